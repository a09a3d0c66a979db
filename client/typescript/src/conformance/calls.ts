/** The client steps about calls and openings of streams; tests/conformance/clients.py is the Python equivalent. */
import { setTimeout as sleep } from "node:timers/promises";

import { BadRequestSchema, ErrorInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { connect, MemstreamError } from "../index.js";
import type { WatchedEvent, Memory } from "../index.js";
import { textOf } from "./matching.js";
import { requestFault, Mismatch } from "./harness.js";
import type { Step } from "./step.js";

const RETRY = { delayMinMs: 10, delayMaxMs: 200 };
type Attempts = Record<string, (signal?: AbortSignal) => Promise<unknown>>;

/** A unary call and an opening of each stream. */
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
      if (first.done) throw new Mismatch("the watch ended");
    },
  };
}

/** Runs attempts concurrently, and throws the problems that `check` finds in their results. */
async function runTogether(all: Attempts, check: (end: PromiseSettledResult<unknown>) => string, signal?: AbortSignal): Promise<void> {
  const names = Object.keys(all);
  const ends = await Promise.allSettled(Object.values(all).map((attempt) => attempt(signal)));
  const wrong = ends.map((end, place) => [names[place], check(end)]).filter(([, content]) => content !== "");
  if (wrong.length > 0) throw new Mismatch(wrong.map((one) => one.join(" ")).join("; "));
}

/** Uses a stream of each kind before and after the token is revoked, until each was opened again. */
async function useUntilReopened(memory: Memory, step: Step, revoke: () => Promise<void>): Promise<void> {
  const stream = await memory.observe(step.producer);
  const queries = await memory.recall();
  const watch = memory.watch({ from: "beginning" });
  const events: AsyncIterator<WatchedEvent, unknown> = watch[Symbol.asyncIterator]();
  const use = async (): Promise<void> => {
    const sent = await stream.send(step.contentOf(Number(stream.expectedSequence)));
    await sent.stored;
    await queries.query("word1");
    if ((await events.next()).done) throw new Mismatch("the watch ended");
  };
  await use();
  await revoke();
  while (Math.min(stream.connections, queries.connections, watch.connections) < 2) await use();
  watch.close();
  await queries.close();
  await stream.close();
}

export const CALL_STEPS: Readonly<Record<string, (step: Step) => Promise<void>>> = {
  /** Checks the invalid fields in the status details of an error. */
  async details(step) {
    const failed: unknown = await step.memory.recallOnce("").catch((thrown: unknown) => thrown);
    if (!(failed instanceof MemstreamError)) throw new Mismatch(`it failed with ${String(failed)}`);
    const fields = failed.findDetails(BadRequestSchema).flatMap((one) => one.fieldViolations).map((one) => one.field);
    const reasons = failed.findDetails(ErrorInfoSchema).map((one) => one.reason);
    if (fields.join() !== textOf(step.given["field"]) || reasons.join() !== "INVALID_FIELD") {
      throw new Mismatch(`it failed with ${failed.message}, with the details ${fields.join()} and ${reasons.join()}`);
    }
  },

  /** Starts each attempt while the server is unreachable; it succeeds. */
  async away(step) {
    await requestFault("away");
    const { namespace, name: memory } = step.memory.path;
    const observations = [{ body: { case: "content" as const, value: step.contentOf(step.upto) } }];
    const batch = (): Promise<unknown> => step.client.streams.observeBatch({ namespace, memory, observations });
    const failed = (end: PromiseSettledResult<unknown>): string => (
      end.status === "rejected" ? `failed with ${String(end.reason)}` : ""
    );
    await runTogether({ ...attempts(step), "a batch": batch }, failed);
  },

  /** Starts each attempt while the server is unreachable, and aborts it. */
  async abort(step) {
    await requestFault("down");
    const given = new AbortController();
    const aborted = (end: PromiseSettledResult<unknown>): string => {
      if (end.status === "fulfilled") return "succeeded";
      const own = end.reason instanceof DOMException && end.reason.name === "AbortError";
      return own ? "" : `failed with ${String(end.reason)}`;
    };
    const ended = runTogether(attempts(step), aborted, given.signal);
    await sleep(200);
    given.abort();
    await ended.finally(() => requestFault("up"));
  },

  /** Uses a client whose token function returns another token after the first one is revoked. */
  async renew(step) {
    const [first = "", second = ""] = (step.given["tokens"] as unknown[]).map(String);
    let current = first;
    const client = connect(step.address, { retry: RETRY, token: () => Promise.resolve(current) });
    const former = connect(step.address, { retry: RETRY, token: first });
    try {
      const path = `${step.memory.path.namespace}/${step.memory.path.name}`;
      await useUntilReopened(await client.ensureMemory(path), step, async () => {
        current = second;
        await requestFault("revoke");
      });
      await step.expectFailure(former.memory(path).observe("p"));
    } finally {
      client.close();
      former.close();
    }
  },
};
