/** Arguments that TypeScript would reject are rejected at run time, too. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Code } from "@connectrpc/connect";

import { ErrorReason } from "../gen/memstream/v1/error_pb.js";
import { RecallQuerySchema } from "../gen/memstream/v1/stream_service_pb.js";
import { checkedMessage } from "../checks.js";
import { MemstreamError } from "../errors.js";
import { connect } from "../index.js";
import { toObservation } from "../observe.js";

type Init = Parameters<typeof toObservation>[0];

/** Whether the error is of the argument `field`. */
const of = (field: string) => (error: unknown): boolean =>
  error instanceof MemstreamError && error.reason === ErrorReason.INVALID_FIELD && error.violations[0]?.field === field;

void test("unknown options are rejected", async () => {
  const client = connect("127.0.0.1:1", { timeoutMs: 10 });
  const memory = client.memory("a/b");
  const wrong = { limit: 1 } as object;
  assert.throws(() => connect("127.0.0.1:1", { tokn: "x" } as object), of("settings.tokn"));
  await assert.rejects(memory.recallOnce("x", wrong), of("options.limit"));
  await assert.rejects(memory.observe("p", wrong), of("options.limit"));
  await assert.rejects(memory.recall(wrong), of("options.limit"));
  await assert.rejects(memory.observeBatch(["x"], wrong), of("options.limit"));
  assert.throws(() => memory.watch(wrong), of("options.limit"));
  await assert.rejects(memory.recallOnce("x", null as unknown as object), of("options"));
  client.close();
});

void test("messages with unknown fields or other types are rejected", () => {
  const cases: [unknown, string][] = [
    [{ content: "x" }, "observation.content"],
    [{ body: { case: "text", value: "x" } }, "observation.body.case"],
    [{ body: { case: "content", value: 7 } }, "observation.body.value"],
    [{ body: "x" }, "observation.body"],
    [{ session: 7 }, "observation.session"],
    [{ importance: "high" }, "observation.importance"],
    [{ role: "user" }, "observation.role"],
    [{ supersedes: "x" }, "observation.supersedes"],
    [{ supersedes: [7] }, "observation.supersedes[0]"],
    [{ metadata: { page: { case: "x" } } }, "observation.metadata.page.case"],
    [7, "observation"],
    [["x"], "observation"],
    [null, "observation"],
  ];
  for (const [given, field] of cases) assert.throws(() => toObservation(given as Init), of(field), field);
  assert.throws(() => toObservation(checkedMessage("query", RecallQuerySchema, {}) as unknown as Init), of("observation"));
  assert.throws(() => checkedMessage("query", RecallQuerySchema, { filter: { speaker: "x" } } as object), of("query.filter.speaker"));
});

void test("valid messages pass", () => {
  const made = toObservation({ body: { case: "content", value: "x" }, session: "s", importance: 0.5, supersedes: ["a"] });
  assert.equal(toObservation(made).session, "s");
  assert.equal(toObservation("x").body.value, "x");
});

void test("errors name their reason as text", () => {
  const error = new MemstreamError("no memory m", Code.NotFound, { reason: ErrorReason.MEMORY_NOT_FOUND });
  assert.equal(String(error), "MemstreamError: MEMORY_NOT_FOUND: no memory m");
  assert.equal(String(new MemstreamError("gone", Code.Unavailable)), "MemstreamError: [unavailable] gone");
});
