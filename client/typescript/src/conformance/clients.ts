/** Runs the client steps of conformance cases; tests/conformance/clients.py is the Python equivalent. */
import { Code } from "@connectrpc/connect";

import { AckLevel, connect, EventType, MemstreamError } from "../index.js";
import { Tier } from "../gen/memstream/v1/fragment_pb.js";
import type { Sent } from "../index.js";
import { CALL_STEPS } from "./calls.js";
import { textOf } from "./matching.js";
import type { JsonObject } from "./matching.js";
import { requestFault, Mismatch } from "./harness.js";
import { Step } from "./step.js";

/** A server takes its time to start, more of it on a busy machine. */
const PATIENT = { timeoutMs: 120_000, retry: { callsMs: 60_000, firstMs: 60_000, delayMinMs: 10, delayMaxMs: 200 } };

export async function runClientStep(address: string, step: JsonObject): Promise<void> {
  const client = connect(address, PATIENT);
  try {
    const run = STEPS[textOf(step["client"])];
    if (run === undefined) throw new Mismatch(`there is no step ${textOf(step["client"])}`);
    await run(new Step(address, client, client.memory(textOf(step["memory"])), step));
  } finally {
    client.close();
  }
}

const STEPS: Readonly<Record<string, (step: Step) => Promise<void>>> = {
  ...CALL_STEPS,

  async observe(step) {
    const stream = await step.memory.observe(step.producer);
    for (let number = Number(stream.expectedSequence); number <= step.upto; number += 1) {
      await stream.send(step.contentOf(number));
      await step.askAt(number);
    }
    await stream.close();
    const reached = [stream.received, stream.stored, BigInt(stream.rejectedCount)];
    if (reached.join() !== [step.upto, step.upto, 0].join()) {
      throw new Mismatch(`received, stored, rejected are ${reached.join()}`);
    }
  },

  async flush(step) {
    const stream = await step.memory.observe(step.producer, { ackLevel: AckLevel.INDEXED });
    for (let number = Number(stream.expectedSequence); number <= step.upto; number += 1) {
      await stream.send(step.contentOf(number));
      await step.askAt(number);
      await stream.flush();
    }
    await stream.flush();
    const reached = [stream.stored, stream.indexed];
    if (reached.join() !== [step.upto, step.upto].join()) throw new Mismatch(`stored, indexed are ${reached.join()}`);
    await stream.close();
  },

  async listed(step) {
    const contents: unknown[] = [];
    const { namespace, name: memory } = step.memory.path;
    let pageToken = "";
    do {
      const page = await step.client.memories.listFragments({ namespace, memory, pageSize: 250, pageToken });
      contents.push(...page.fragments.map((one) => one.body.value));
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    const expected = Array.from({ length: step.upto }, (_, place) => step.contentOf(place + 1));
    if (contents.join() !== expected.join()) throw new Mismatch(`there are ${contents.length}: ${contents.join()}`);
  },

  async refused(step) {
    const stream = await step.memory.observe(step.producer);
    const good = await stream.send("tea");
    const bad = await stream.send("x".repeat(100_000));
    const other = await stream.send("rain");
    await bad.stored.then(
      () => { throw new Mismatch("it was not rejected"); },
      (thrown: unknown) => { step.checkError(thrown); },
    );
    await Promise.all([good.stored, other.stored]);
    await stream.close();
    if (stream.stored !== 3n || stream.rejectedCount !== 1 || stream.rejected[0]?.sequence !== 2n) {
      throw new Mismatch(`stored is ${stream.stored.toString()}, rejected are ${stream.rejectedCount}`);
    }
  },

  /** Checks that each observation ends exactly once: rejected, or stored with its outcome. */
  async outcomes(step) {
    const stream = await step.memory.observe(step.producer, { outcomes: true });
    const every = Number(step.given["refusedEvery"]);
    const sent: Sent[] = [];
    for (let number = 1; number <= step.upto; number += 1) {
      sent.push(await stream.send(number % every === 0 ? "x".repeat(100_000) : step.contentOf(number)));
      await step.askAt(number);
    }
    await stream.flush();
    const ids = new Set<string>();
    for (const one of sent) {
      if (Number(one.sequence) % every === 0) {
        await step.expectFailure(one.stored);
      } else {
        await one.stored;
        if (one.outcome) ids.add(one.outcome.fragmentId);
      }
    }
    const refused = Math.floor(step.upto / every);
    if (stream.rejectedCount !== refused || ids.size !== step.upto - refused || ids.has("")) {
      throw new Mismatch(`${stream.rejectedCount} were rejected, ${ids.size} have an outcome`);
    }
    await stream.close();
  },

  async recall(step) {
    const stream = await step.memory.recall();
    const askAll = (): Promise<void>[] =>
      Array.from({ length: step.upto }, (_, place) => step.queryOne(stream, place + 1));
    const asked = askAll();
    await requestFault(textOf(step.given["during"]));
    await Promise.all([...asked, ...askAll()]);
    if (stream.connections < 2) throw new Mismatch("the connection was never cut");
    await stream.close();
  },

  async stand(step) {
    const producer = await step.memory.observe(step.producer);
    const stream = await step.memory.recall();
    const text = { case: "text" as const, value: `what of ${step.producer}?` };
    const standing = stream.subscribe({ observation: text, limit: 100 });
    const changes = standing[Symbol.asyncIterator]();
    const entered: unknown[] = [];
    const heard = async (number: number): Promise<void> => {
      const { value: change } = await changes.next();
      if (!change) throw new Mismatch(`it ended after ${number}`);
      entered.push(...change.entered.map((one) => one.fragment?.body.value));
      const counts = [change.changed.length, change.retracted.length, change.answer.recollections.length];
      if (counts.join() !== [0, 0, entered.length].join()) {
        throw new Mismatch(`after ${number} changed, retracted, answer are ${counts.join()}`);
      }
    };
    await heard(0);
    const expected = Array.from({ length: step.upto }, (_, place) => step.contentOf(place + 1));
    for (const [place, content] of expected.entries()) {
      await producer.send(content);
      await step.askAt(place + 1);
      while (!entered.includes(content)) await heard(place + 1);
    }
    if (entered.sort().join() !== expected.sort().join()) throw new Mismatch(`entered are ${entered.join()}`);
    if (stream.connections < 2) throw new Mismatch("the connection was never cut");
    standing.close();
    await stream.close();
    await producer.close();
  },

  async "give up"(step) {
    const stream = await step.memory.recall();
    const given = new AbortController();
    const late = { observation: { case: "text" as const, value: "word1" }, minRevision: 1_000_000n };
    const hanging = stream.query(late, { signal: given.signal }).then(
      () => "it was answered",
      (thrown: unknown) => (given.signal.aborted ? "" : String(thrown)),
    );
    await Promise.all([1, 2, 3, 4, 5].map((number) => step.queryOne(stream, number)));
    given.abort();
    const wrong = await hanging;
    if (wrong) throw new Mismatch(wrong);
    await step.queryOne(stream, 7);
    await stream.close();
  },

  async watch(step) {
    const seen = new Set<string>();
    for await (const { event } of step.memory.watch({ from: "beginning", types: [EventType.OBSERVED] })) {
      if (seen.has(event.fragmentId)) throw new Mismatch(`the event of ${event.fragmentId} was sent twice`);
      seen.add(event.fragmentId);
      await step.askAt(seen.size);
      if (seen.size === step.given["observed"]) return;
    }
    throw new Mismatch(`the watch ended after ${seen.size} events`);
  },

  async "no memory"(step) {
    const { namespace, name: memory } = step.memory.path;
    const attempts: (() => Promise<unknown>)[] = [
      () => step.client.memories.getMemory({ namespace, memory }),
      () => step.memory.observe("p"),
      () => step.memory.recall(),
      () => step.memory.watch()[Symbol.asyncIterator]().next(),
    ];
    for (const attempt of attempts) await step.expectFailure(attempt());
  },

  async "too large"(step) {
    const large = "x".repeat(20_000_000);
    const stream = await step.memory.observe(step.producer);
    const refused = await stream.send(large).catch((thrown: unknown) => thrown);
    if (!(refused instanceof MemstreamError && refused.code === Code.InvalidArgument)) {
      throw new Mismatch(`it was rejected with ${String(refused)}`);
    }
    await stream.send("tea");
    await stream.close();
    if (stream.stored !== 1n) throw new Mismatch(`stored is ${stream.stored.toString()}`);
    await step.expectFailure(step.memory.recallOnce(large));
  },

  async late(step) {
    const stream = await step.memory.recall();
    const late = { observation: { case: "text" as const, value: "word1" }, minRevision: 1_000_000n };
    await step.expectFailure(step.memory.recallOnce(late, { timeoutMs: 500 }));
    await step.expectFailure(stream.query(late, { timeoutMs: 500 }));
    await step.queryOne(stream, 7);
    await stream.close();
  },

  async "unknown values"(step) {
    const { recollections } = await step.memory.recallOnce("word1");
    const fragment = recollections[0]?.fragment;
    if (fragment?.body.value !== step.contentOf(1) || fragment.tier in Tier) {
      throw new Mismatch(`found ${JSON.stringify(fragment?.body.value)} in ${String(fragment?.tier)}`);
    }
    for await (const { event } of step.memory.watch({ from: "beginning" })) if (!(event.type in EventType)) return;
    throw new Mismatch("the watch ended");
  },
};
