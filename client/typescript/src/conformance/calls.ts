/** The steps of cases that are about calls and openings; tests/conformance/clients.py has the same in Python. */
import { setTimeout as sleep } from "node:timers/promises";

import { BadRequestSchema, ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { connect, MemstreamError } from "../index.js";
import type { Happening, Memory } from "../index.js";
import type { Step } from "./clients.js";
import { textOf } from "./matching.js";
import { ask, Wrong } from "./telling.js";

const RETRY = { delayMinMs: 10, delayMaxMs: 200 };
type Attempts = Record<string, (signal?: AbortSignal) => Promise<unknown>>;

/** A call and an opening of each kind. */
function attempts({ client, memory }: Step): Attempts {
  const { namespace, name } = memory.path;
  return {
    "a call": (signal) => client.memories.getMemory({ namespace, memory: name }, signal && { signal }),
    "a recall": (signal) => memory.recallOnce("word1", { signal }),
    observe: async (signal) => { await (await memory.observe("another", { signal })).close(); },
    recall: async (signal) => {
      const stream = await memory.recall({ signal });
      await stream.query("word1", { signal });
      await stream.close();
    },
    watch: async (signal) => {
      const first = await memory.watch({ from: "beginning", signal })[Symbol.asyncIterator]().next();
      if (first.done) throw new Wrong("the watch ended");
    },
  };
}

/** Throws what check says of how each attempt has ended. */
async function together(all: Attempts, check: (end: PromiseSettledResult<unknown>) => string, signal?: AbortSignal): Promise<void> {
  const names = Object.keys(all);
  const ends = await Promise.allSettled(Object.values(all).map((attempt) => attempt(signal)));
  const wrong = ends.map((end, place) => [names[place], check(end)]).filter(([, said]) => said !== "");
  if (wrong.length > 0) throw new Wrong(wrong.map((one) => one.join(" ")).join("; "));
}

/** Uses a stream of each kind before and after the token is revoked, until each was opened again. */
async function goOn(memory: Memory, step: Step, revoke: () => Promise<void>): Promise<void> {
  const stream = await memory.observe(step.producer);
  const queries = await memory.recall();
  const watch = memory.watch({ from: "beginning" });
  const events: AsyncIterator<Happening, unknown> = watch[Symbol.asyncIterator]();
  const use = async (): Promise<void> => {
    const sent = await stream.send(step.said(Number(stream.expectedSequence)));
    await sent.stored;
    await queries.query("word1");
    if ((await events.next()).done) throw new Wrong("the watch ended");
  };
  await use();
  await revoke();
  while (Math.min(stream.connections, queries.connections, watch.connections) < 2) await use();
  watch.close();
  await queries.close();
  await stream.close();
}

export const CALL_STEPS: Readonly<Record<string, (step: Step) => Promise<void>>> = {
  /** The fields that are wrong, as Connect has the details of a status. */
  async details(step) {
    const failed: unknown = await step.memory.recallOnce("").catch((thrown: unknown) => thrown);
    if (!(failed instanceof MemstreamError)) throw new Wrong(`it ended with ${String(failed)}`);
    const fields = failed.findDetails(BadRequestSchema).flatMap((one) => one.fieldViolations).map((one) => one.field);
    const reasons = failed.findDetails(ErrorInfoSchema).map((one) => one.reason);
    if (fields.join() !== textOf(step.given["field"]) || reasons.join() !== "INVALID_FIELD") {
      throw new Wrong(`it failed with ${failed.message}, of the details ${fields.join()} and ${reasons.join()}`);
    }
  },

  /** Each is begun while the server cannot be reached, and succeeds. */
  async away(step) {
    await ask("away");
    const { namespace, name: memory } = step.memory.path;
    const observations = [{ body: { case: "content" as const, value: step.said(step.upto) } }];
    const batch = (): Promise<unknown> => step.client.streams.observeBatch({ namespace, memory, observations });
    const failed = (end: PromiseSettledResult<unknown>): string => (
      end.status === "rejected" ? `failed with ${String(end.reason)}` : ""
    );
    await together({ ...attempts(step), "a batch": batch }, failed);
  },

  /** Each is begun while the server cannot be reached, and aborted. */
  async abort(step) {
    await ask("down");
    const given = new AbortController();
    const aborted = (end: PromiseSettledResult<unknown>): string => {
      if (end.status === "fulfilled") return "succeeded";
      const own = end.reason instanceof DOMException && end.reason.name === "AbortError";
      return own ? "" : `failed with ${String(end.reason)}`;
    };
    const ended = together(attempts(step), aborted, given.signal);
    await sleep(200);
    given.abort();
    await ended.finally(() => ask("up"));
  },

  /** Calls and streams of a client whose token function gives another token when the first one is revoked. */
  async renew(step) {
    const [first = "", second = ""] = (step.given["tokens"] as unknown[]).map(String);
    let current = first;
    const client = connect(step.address, { retry: RETRY, token: () => Promise.resolve(current) });
    const former = connect(step.address, { retry: RETRY, token: first });
    try {
      const path = `${step.memory.path.namespace}/${step.memory.path.name}`;
      await goOn(await client.ensureMemory(path), step, async () => {
        current = second;
        await ask("revoke");
      });
      await step.fails(former.memory(path).observe("p"));
    } finally {
      client.close();
      former.close();
    }
  },
};
