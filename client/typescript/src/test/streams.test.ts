/** Streams with a scripted server; tests/client has more of these tests in Python. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer as createSilent } from "node:net";
import type { Socket } from "node:net";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";

import { CursorSchema } from "../gen/memstream/v1/event_pb.js";
import { ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import type {
  ObserveResponseSchema,
  RecallQuery,
  RecallRequest,
  RecallResponseSchema,
} from "../gen/memstream/v1/stream_service_pb.js";
import { AckLevel, ClosedError, connect, ErrorReason, MemstreamError } from "../index.js";
import type { AnswerChange } from "../index.js";
import { drains } from "../recall.js";
import { cut, LIMIT_MS, withScripted } from "./scripted.js";
import type { Observing, Reader, Recalling, Watching } from "./scripted.js";

/** The answer of a server that has received and stored everything up to a number. */
function opened(upto: bigint, windowObservations: number, windowBytes = 1n << 20n): MessageInitShape<
  typeof ObserveResponseSchema
> {
  const value = { received: upto, stored: upto, expectedSequence: upto + 1n, revision: upto, windowObservations };
  return { message: { case: "opened", value: { ...value, windowBytes } } };
}

function ack(upto: bigint, flushed = 0n, indexed = 0n): MessageInitShape<typeof ObserveResponseSchema> {
  const value = { received: upto, stored: upto, revision: upto, flushed, indexed };
  return { message: { case: "ack", value } };
}

void test("repeats stay within a shrunk window", async () => {
  const first: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 10);
    for (let last = 0n; last < 2n;) {
      const batch = await requests.next();
      assert(batch.case === "batch");
      last = batch.value.firstSequence + BigInt(batch.value.observations.length) - 1n;
    }
    throw cut();
  };
  const second: Observing = async function* (requests) {
    await requests.next();
    yield opened(2n, 1);
    for (const number of [1n, 2n]) {
      const batch = await requests.next();
      assert(batch.case === "batch" && batch.value.firstSequence === number);
      yield ack(2n, number - 1n);
      const flush = await requests.next();
      assert(flush.case === "flush" && flush.value.flushId === number);
      yield ack(2n, number);
    }
    assert.equal((await requests.next()).case, "close");
    yield { message: { case: "closed", value: { received: 2n, stored: 2n, revision: 2n } } };
  };
  await withScripted({ observe: [first, second] }, async (memory) => {
    const stream = await memory.observe("p", { ackLevel: AckLevel.INDEXED });
    await stream.send("one");
    const sent = await stream.send("two");
    const flush = assert.rejects(stream.flush(), ClosedError);
    assert.equal(await sent.stored, 2n); // the index may be unavailable for long
    await stream.close(); // waits until everything is stored; no acknowledgement follows
    await flush;
  });
});

void test("a send fails if a shrunk window can never admit it", async () => {
  const first: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 10, 1000n);
    await requests.next();
    await sleep(50);
    throw cut();
  };
  const second: Observing = async function* (requests) {
    await requests.next();
    yield opened(1n, 10, 500n);
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ observe: [first, second] }, async (memory) => {
    const stream = await memory.observe("p");
    await stream.send("x".repeat(400));
    const hasReason = (error: unknown): boolean => error instanceof MemstreamError && error.reasonName === "INVALID_FIELD";
    await assert.rejects(stream.send("y".repeat(800)), hasReason);
    await stream.abandon();
    await assert.rejects(stream.send("z"), ClosedError);
  });
});

void test("the revision follows a restored server", async () => {
  let cutNow = (): void => undefined;
  const first: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 10);
    await requests.next();
    const until = new Promise<void>((resolve) => { cutNow = resolve; });
    yield { message: { case: "ack", value: { received: 1n, revision: 3n } } };
    await until;
    throw cut();
  };
  const second: Observing = async function* (requests) {
    await requests.next();
    yield opened(1n, 10);
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ observe: [first, second] }, async (memory) => {
    const stream = await memory.observe("p", { ackLevel: AckLevel.RECEIVED });
    const sent = await stream.send("one");
    await stream.flush();
    assert.equal(stream.revision, 3n);
    cutNow();
    assert.equal(await sent.stored, 1n);
    assert.equal(stream.revision, 1n);
    await stream.abandon();
  });
});

void test("a flush waits for unsolicited indexed acknowledgements", async () => {
  let indexed = (): void => undefined;
  const observing: Observing = async function* (requests) {
    const open = await requests.next();
    assert(open.case === "open" && open.value.ackLevel === AckLevel.STORED);
    yield opened(0n, 10);
    await requests.next();
    const until = new Promise<void>((resolve) => { indexed = resolve; });
    yield ack(1n);
    await until;
    yield ack(1n, 0n, 1n);
    assert.equal((await requests.next()).case, "close");
    yield { message: { case: "closed", value: { received: 1n, stored: 1n, revision: 1n } } };
  };
  await withScripted({ observe: [observing] }, async (memory) => {
    const stream = await memory.observe("p", { ackLevel: AckLevel.INDEXED });
    await (await stream.send("one")).stored;
    let done = false;
    const flush = stream.flush().then(() => { done = true; });
    await sleep(50);
    assert(!done);
    indexed();
    await flush;
    await stream.close();
  });
});

void test("queries beyond what the next server takes wait", async () => {
  const heard: string[] = [];
  let give = (): void => undefined;
  const given = new Promise<void>((resolve) => { give = resolve; });
  const opens = (queriesInFlightMax: number): MessageInitShape<typeof RecallResponseSchema> => (
    { message: { case: "opened", value: { limits: { queriesInFlightMax } } } }
  );
  const readAndAnswer = async (requests: Reader<RecallRequest>): Promise<MessageInitShape<typeof RecallResponseSchema>> => {
    const query = await requests.next();
    assert(query.case === "query" && query.value.observation.case === "text");
    heard.push(query.value.observation.value);
    return { message: { case: "done", value: { queryId: query.value.queryId } } };
  };
  const first: Recalling = async function* (requests) {
    await requests.next();
    yield opens(4);
    for (let count = 0; count < 4; count += 1) await readAndAnswer(requests);
    throw cut();
  };
  const second: Recalling = async function* (requests) {
    await requests.next();
    yield opens(2);
    const held = [await readAndAnswer(requests), await readAndAnswer(requests)];
    await given;
    yield* held;
    yield await readAndAnswer(requests);
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ recall: [first, second] }, async (memory) => {
    const stream = await memory.recall();
    const third = new AbortController();
    const asked = ["0", "1", "2", "3"].map((text) => stream.query(text, { signal: text === "2" ? third.signal : undefined }));
    const stopped = assert.rejects(asked.splice(2, 1)[0] ?? Promise.resolve(), { name: "AbortError" });
    while (heard.length < 6) await sleep(5);
    third.abort();
    await stopped;
    await sleep(50);
    assert.deepEqual(heard.slice(4), ["0", "1"]); // over the limit, the server would reject them
    give();
    await Promise.all(asked);
    assert.deepEqual(heard.slice(4), ["0", "1", "3"]); // and no cancel of a query that this connection never sent
    await stream.abandon();
    await assert.rejects(stream.query("late"), ClosedError);
  });
});

void test("a queued send ends with its signal", async () => {
  let admit = (): void => undefined;
  const released = new Promise<void>((resolve) => { admit = resolve; });
  const observing: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 1);
    await requests.next();
    await released;
    yield ack(1n);
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ observe: [observing] }, async (memory) => {
    const stream = await memory.observe("p");
    await stream.send("one");
    const second = stream.send("two");
    const third = new AbortController();
    const given = assert.rejects(stream.send("three", { signal: third.signal }), { name: "AbortError" });
    third.abort();
    await given;
    admit();
    assert.equal((await second).sequence, 2n);
    assert.equal(stream.expectedSequence, 3n);
    await stream.abandon();
  });
});

void test("a connection cut during a pause takes nothing from the next", async () => {
  const first: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 10);
    yield { message: { case: "throttle", value: { retryDelay: { nanos: 200_000_000 } } } };
    await sleep(50);
    throw cut();
  };
  const second: Observing = async function* (requests) {
    await requests.next();
    yield opened(0n, 10);
    assert.equal((await requests.next()).case, "batch");
    yield ack(1n);
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ observe: [first, second] }, async (memory) => {
    const stream = await memory.observe("p");
    await sleep(20); // the client has read the throttle message
    const sent = await stream.send("one");
    assert.equal(await sent.stored, 1n);
    await stream.abandon();
  });
});

void test("a call fails at once if a retry would exceed its timeout", async () => {
  const recallOnce = (): never => {
    const details = [{ desc: RetryInfoSchema, value: { retryDelay: { seconds: 60n } } }];
    throw new ConnectError("away", Code.Unavailable, undefined, details);
  };
  await withScripted({ recallOnce, timeoutMs: 50_000 }, async (memory) => {
    await assert.rejects(memory.recallOnce("?"), { code: Code.Unavailable, retryAfterMs: 60_000 });
  });
});

void test("a watch ends if it is aborted while it resolves 'now'", async () => {
  const held: Socket[] = [];
  const silent = createSilent((socket) => held.push(socket));
  silent.listen(0, "127.0.0.1");
  await once(silent, "listening");
  const address = silent.address();
  assert(address !== null && typeof address === "object");
  const client = connect(`127.0.0.1:${address.port}`, { timeoutMs: 500 });
  const watch = client.memory("ns/m").watch({ signal: AbortSignal.timeout(50) });
  await assert.rejects(watch[Symbol.asyncIterator]().next(), { name: "TimeoutError" });
  client.close();
  for (const socket of held) socket.destroy();
  silent.close();
});

void test("a closed watch yields no more events", async () => {
  const watch: Watching = async function* () {
    yield { message: { case: "events", value: { events: [{}, {}, {}] } } };
    await sleep(LIMIT_MS, undefined, { ref: false });
  };
  await withScripted({ watch }, async (memory) => {
    const events = memory.watch({ from: create(CursorSchema) });
    let count = 0;
    for await (const { event } of events) {
      assert(event.fragmentId === "");
      count += 1;
      events.close();
    }
    assert.equal(count, 1);
  });
});

/** An answer to a standing query: the fragments of `fresh` are in the message, with the revision as their etag. */
function answerOf(queryId: string, ranking: string, fresh: string, revision = 1n): MessageInitShape<
  typeof RecallResponseSchema
> {
  const recollections = Array.from(fresh, (id) => ({ fragment: { id, etag: revision.toString() } }));
  const done = { queryId, revision, rankingIds: Array.from(ranking) };
  return { message: { case: "recollections", value: { queryId, recollections, done } } };
}

/** A failure of a query with a retry delay of 30 ms. */
function failureOf(queryId: string, code: Code, reason: ErrorReason): MessageInitShape<typeof RecallResponseSchema> {
  const info = create(ErrorInfoSchema, { domain: "memstream.dev", reason: ErrorReason[reason] });
  const retry = create(RetryInfoSchema, { retryDelay: { nanos: 30_000_000 } });
  const details = [anyPack(ErrorInfoSchema, info), anyPack(RetryInfoSchema, retry)];
  return { message: { case: "failed", value: { queryId, status: { code, details } } } };
}

async function readQuery(requests: Reader<RecallRequest>): Promise<RecallQuery> {
  const query = await requests.next();
  assert(query.case === "query", query.case);
  return query.value;
}

const ready: MessageInitShape<typeof RecallResponseSchema> = { message: { case: "opened", value: {} } };

/** The ids of the answer, and of what entered, changed and left. */
function idsOf({ answer: { recollections }, entered, changed, retracted }: AnswerChange): string[] {
  const ids = (all: typeof recollections): string => all.map((one) => one.fragment?.id).join("");
  for (const [place, { rank }] of recollections.entries()) assert.equal(rank, place + 1);
  return [ids(recollections), ids(entered), ids(changed), retracted.join("")];
}

/** Reads the next change. */
async function readChange(changes: AsyncIterator<AnswerChange, void>): Promise<string[]> {
  const next = await changes.next();
  assert(!next.done, "the query ended");
  return idsOf(next.value);
}

void test("a standing query returns changes across connections", async () => {
  let go = (): void => undefined;
  const step = (): Promise<void> => new Promise((resolve) => { go = resolve; });
  const first: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    const { queryId, subscribe, observation } = await readQuery(requests);
    assert(subscribe && observation.value === "what?");
    yield answerOf(queryId, "ab", "ab");
    await step();
    yield answerOf(queryId, "ba", "");
    yield { message: { case: "retracted", value: { queryId, fragmentIds: ["b"] } } };
    yield answerOf(queryId, "ca", "ca", 2n);
    await step();
    yield { message: { case: "recollections", value: { queryId, recollections: [{ fragment: { id: "x" } }] } } };
    throw cut();
  };
  const second: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    const { queryId } = await readQuery(requests);
    yield answerOf(queryId, "ca", "ca", 2n);
    await step();
    yield failureOf(queryId, Code.Unavailable, ErrorReason.JOURNAL_UNAVAILABLE); // by then the third connection has resent it, once
    throw cut();
  };
  const third: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    const { queryId } = await readQuery(requests);
    yield answerOf(queryId, "dc", "dc", 2n);
    const cancel = await requests.next();
    assert(cancel.case === "cancel" && cancel.value.queryId === queryId);
    yield { message: { case: "done", value: { queryId: (await readQuery(requests)).queryId } } };
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ recall: [first, second, third] }, async (memory) => {
    const stream = await memory.recall();
    const standing = stream.subscribe("what?");
    const changes: string[][] = [];
    for await (const change of standing) {
      changes.push(idsOf(change));
      assert.equal(change.answer, standing.answer);
      if (changes.length === 3) {
        await sleep(60);
        break;
      }
      // A slow reader gets fewer changes, and the second connection's answer is no change.
      while (changes.length === 1 ? standing.answer?.done.revision !== 2n : stream.connections < 3) {
        go();
        await sleep(5);
      }
    }
    assert.deepEqual(changes, [["ab", "ab", "", ""], ["ca", "c", "a", "b"], ["dc", "d", "", "a"]]);
    await stream.query("has the cancel arrived?");
    assert((await standing[Symbol.asyncIterator]().next()).done);
    await stream.abandon();
  });
});

void test("a standing query is resent only after a transient error", async () => {
  const recalling: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    const { queryId } = await readQuery(requests);
    yield answerOf(queryId, "a", "a");
    yield failureOf(queryId, Code.Unavailable, ErrorReason.JOURNAL_UNAVAILABLE);
    assert.equal((await readQuery(requests)).queryId, queryId);
    yield answerOf(queryId, "b", "b");
    yield failureOf(queryId, Code.NotFound, ErrorReason.MEMORY_NOT_FOUND);
    yield { message: { case: "done", value: { queryId: (await readQuery(requests)).queryId } } };
    yield failureOf((await readQuery(requests)).queryId, Code.Unavailable, ErrorReason.JOURNAL_UNAVAILABLE);
    const wrong = await readQuery(requests);
    yield answerOf(wrong.queryId, "a", "a");
    yield failureOf(wrong.queryId, Code.Unavailable, ErrorReason.JOURNAL_UNAVAILABLE);
    yield answerOf((await readQuery(requests)).queryId, "ab", "b");
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ recall: [recalling] }, async (memory) => {
    const stream = await memory.recall();
    const hasReason = (reasonName: string) => (error: unknown): boolean =>
      error instanceof MemstreamError && error.reasonName === reasonName;
    const changes = stream.subscribe("what?")[Symbol.asyncIterator]();
    assert.deepEqual(await readChange(changes), ["a", "a", "", ""]);
    assert.deepEqual(await readChange(changes), ["b", "b", "", "a"]);
    await assert.rejects(changes.next(), hasReason("MEMORY_NOT_FOUND"));
    await stream.query("another query");
    const first = stream.subscribe("never answered")[Symbol.asyncIterator]();
    await assert.rejects(first.next(), hasReason("JOURNAL_UNAVAILABLE"));
    assert.equal(stream.connections, 1);
    const wrong = stream.subscribe("ranks a fragment sent before the resend")[Symbol.asyncIterator]();
    assert.deepEqual(await readChange(wrong), ["a", "a", "", ""]);
    await assert.rejects(wrong.next(), hasReason("PROTOCOL_VIOLATION"));
  });
});

void test("a standing query counts as in flight until it ends", async () => {
  const cancelled: string[] = [];
  const recalling: Recalling = async function* (requests) {
    await requests.next();
    yield { message: { case: "opened", value: { limits: { queriesInFlightMax: 1 } } } };
    for (;;) {
      const request = await requests.next();
      if (request.case === "cancel") cancelled.push(request.value.queryId);
      if (request.case === "close" || request.case === undefined) return;
      if (request.case !== "query") continue;
      const { queryId, subscribe, observation } = request.value;
      if (!subscribe) yield { message: { case: "done", value: { queryId } } };
      else if (observation.value !== "silence") yield answerOf(queryId, "a", "a");
    }
  };
  await withScripted({ recall: [recalling] }, async (memory) => {
    const stream = await memory.recall();
    const standing = stream.subscribe("what?");
    const changes = standing[Symbol.asyncIterator]();
    await changes.next();
    await assert.rejects(stream.query("no room", { timeoutMs: 50 }), { code: Code.DeadlineExceeded });
    const waiting = changes.next();
    standing.close();
    assert((await waiting).done);
    await stream.query("room");

    const given = new AbortController();
    const aborted = stream.subscribe("what?", { signal: given.signal })[Symbol.asyncIterator]();
    assert.deepEqual(await readChange(aborted), ["a", "a", "", ""]);
    given.abort();
    await stream.query("room");
    await assert.rejects(aborted.next(), { name: "AbortError" });
    const never = stream.subscribe("what?", { signal: given.signal })[Symbol.asyncIterator]().next();
    await assert.rejects(never, { name: "AbortError" });

    const late = stream.subscribe("silence", { timeoutMs: 50 })[Symbol.asyncIterator]();
    await assert.rejects(late.next(), { code: Code.DeadlineExceeded });
    await stream.query("room");
    assert.equal(cancelled.length, 3);

    const last = stream.subscribe("what?")[Symbol.asyncIterator]();
    await last.next();
    const end = assert.rejects(last.next(), ClosedError);
    await stream.close();
    await end;
    await assert.rejects(stream.subscribe("what?")[Symbol.asyncIterator]().next(), ClosedError);
    assert.equal(stream.connections, 1);
  });
});

void test("a draining server does not wait for a standing query", async (t) => {
  const before = drains.graceMaxMs;
  drains.graceMaxMs = 60 * LIMIT_MS; // it ends after the test
  t.after(() => { drains.graceMaxMs = before; });
  let go = (): void => undefined;
  const goes = new Promise<void>((resolve) => { go = resolve; });
  const first: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    yield answerOf((await readQuery(requests)).queryId, "a", "a");
    await goes;
    yield { message: { case: "goingAway", value: { grace: { seconds: 3_600n } } } };
    await sleep(LIMIT_MS, undefined, { ref: false });
  };
  const second: Recalling = async function* (requests) {
    await requests.next();
    yield ready;
    yield answerOf((await readQuery(requests)).queryId, "b", "b");
    while ((await requests.next()).case !== undefined);
  };
  await withScripted({ recall: [first, second] }, async (memory) => {
    const stream = await memory.recall();
    const changes = stream.subscribe("what?")[Symbol.asyncIterator]();
    await changes.next();
    go();
    assert.deepEqual(await readChange(changes), ["b", "b", "", "a"]);
    await stream.abandon();
  });
});
