/** Resumption of lost rejections and outcomes, and time limits of queries. */
import assert from "node:assert/strict";
import { test } from "node:test";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import type { ObserveOpenedSchema, ObserveResponseSchema, RecallResponseSchema } from "../gen/memstream/v1/stream_service_pb.js";
import { MemstreamError } from "../index.js";
import type { Sent } from "../index.js";
import { cut, withScripted } from "./scripted.js";
import type { Observing, Recalling } from "./scripted.js";

type Answer = MessageInitShape<typeof ObserveResponseSchema>;

const ready: MessageInitShape<typeof RecallResponseSchema> = { message: { case: "opened", value: {} } };
const rejectionOf = (sequence: bigint): { sequence: bigint; status: { code: number } } => (
  { sequence, status: { code: Code.InvalidArgument } }
);

function opened(upto: bigint, more: MessageInitShape<typeof ObserveOpenedSchema> = {}): Answer {
  const reached = { received: upto, stored: upto, expectedSequence: upto + 1n, revision: upto };
  return { message: { case: "opened", value: { ...reached, windowObservations: 9, windowBytes: 1n << 20n, ...more } } };
}

void test("lost rejections and outcomes are resent", async () => {
  const first: Observing = async function* (requests) {
    const open = await requests.next();
    assert(open.case === "open" && open.value.knownSequence === undefined && open.value.outcomes);
    assert.equal(open.value.related, 2);
    yield opened(0n);
    for (let received = 0; received < 3;) {
      const batch = await requests.next();
      received += batch.case === "batch" ? batch.value.observations.length : 0;
    }
    const outcomes = [{ sequence: 1n, fragmentId: "a", related: [{ fragmentId: "z", share: 0.5 }] }];
    yield { message: { case: "ack", value: { received: 1n, stored: 1n, revision: 1n, outcomes } } };
    throw cut();
  };
  const second: Observing = async function* (requests) {
    const open = await requests.next();
    assert(open.case === "open" && open.value.knownSequence === 1n);
    yield opened(3n, { resumed: 2n, resumeTo: 3n, rejected: [rejectionOf(2n)] });
    const outcomes = [{ sequence: 3n, fragmentId: "c" }];
    yield { message: { case: "ack", value: { received: 3n, stored: 3n, resumed: 3n, outcomes } } };
    for (;;) {
      const next = await requests.next();
      if (next.case === undefined) return;
      if (next.case !== "flush") continue;
      yield { message: { case: "ack", value: { received: 3n, stored: 3n, flushed: next.value.flushId } } };
    }
  };
  await withScripted({ observe: [first, second] }, async (memory) => {
    const stream = await memory.observe("p", { related: 2 });
    const sent: Sent[] = [];
    for (const content of ["a", "b", "c"]) sent.push(await stream.send(content));
    await stream.flush();
    const ends = await Promise.allSettled(sent.map((one) => one.stored));
    assert.deepEqual(ends.map((end) => end.status), ["fulfilled", "rejected", "fulfilled"]);
    assert.deepEqual(sent.map((one) => one.outcome?.fragmentId), ["a", undefined, "c"]);
    assert.deepEqual(sent[0]?.outcome?.related.map((one) => one.fragmentId), ["z"]);
    assert.equal(stream.rejectedCount, 1);
    assert.equal(stream.resumption, undefined);
    await stream.abandon();
  });
});

void test("a resuming process gets the results that it missed", async () => {
  const observing: Observing = async function* (requests) {
    const open = await requests.next();
    assert(open.case === "open" && open.value.knownSequence === 3n);
    yield opened(5n, { rejected: [rejectionOf(4n)], resumed: 4n, resumeTo: 5n, rejectedSince: 4n, outcomesSince: 5n });
    const outcomes = [{ sequence: 5n, fragmentId: "e" }];
    yield { message: { case: "ack", value: { received: 5n, stored: 5n, resumed: 5n, outcomes } } };
    assert.equal((await requests.next()).case, "close");
    assert.equal((await requests.next()).case, undefined);
    yield { message: { case: "closed", value: { received: 5n, stored: 5n } } };
  };
  await withScripted({ observe: [observing] }, async (memory) => {
    const stream = await memory.observe("p", { outcomes: true, knownSequence: 3n });
    const missed = stream.resumption;
    assert(missed);
    assert.deepEqual(missed.rejected.map((one) => one.sequence), [4n]);
    assert.deepEqual(missed.outcomes.map((one) => one.fragmentId), ["e"]);
    assert.deepEqual([missed.rejectedSince, missed.outcomesSince], [4n, 5n]);
    assert.equal(stream.expectedSequence, 6n);
    await stream.close();
  });
});

void test("an incomplete resumption is a protocol violation", async () => {
  const observing: Observing = async function* (requests) {
    await requests.next();
    yield opened(5n, { resumed: 4n, resumeTo: 5n });
    yield { message: { case: "ack", value: { received: 5n, stored: 5n } } };
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ observe: [observing] }, async (memory) => {
    const isViolation = (error: unknown): boolean => (
      error instanceof MemstreamError && error.reasonName === "PROTOCOL_VIOLATION"
    );
    await assert.rejects(memory.observe("p", { knownSequence: 3n }), isViolation);
  });
});

void test("a query carries its time limit, unless it has a timeout", async () => {
  const limits: unknown[] = [];
  const recalling: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    for (;;) {
      const next = await requests.next();
      if (next.case === undefined || next.case === "close") {
        assert.equal((await requests.next()).case, undefined);
        return;
      }
      if (next.case !== "query") continue;
      limits.push([next.value.timeout?.seconds, next.value.timeout?.nanos]);
      yield { message: { case: "done", value: { queryId: next.value.queryId } } };
    }
  };
  await withScripted({ recall: [recalling], timeoutMs: 70_000 }, async (memory) => {
    const stream = await memory.recall();
    await stream.query("tea");
    await stream.query("tea", { timeoutMs: 62_500 });
    await stream.query({ observation: { case: "text", value: "tea" }, timeout: { seconds: 61n } });
    assert.deepEqual(limits, [[70n, 0], [62n, 500_000_000], [61n, 0]]);
    await stream.close();
  });
});
