/** Calls and openings of streams: retries, tokens, signals, details of errors. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer as createSilent } from "node:net";
import type { Socket } from "node:net";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import { create } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, HelpSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import { CursorSchema } from "../gen/memstream/v1/event_pb.js";
import type { CreateMemoryRequest } from "../gen/memstream/v1/memory_service_pb.js";
import { ClosedError, connect, ErrorReason, MemoryKind, MemstreamError, Profile } from "../index.js";
import type { Client, Memory } from "../index.js";
import { cut, LIMIT_MS, withScripted } from "./scripted.js";
import type { Observing, Recalling, Watching } from "./scripted.js";

const QUICK = { callsMs: LIMIT_MS, delayMinMs: 1, delayMaxMs: 2 };
const ready = { message: { case: "opened" as const, value: {} } };
const window = { expectedSequence: 1n, windowObservations: 1, windowBytes: 1n << 20n };
const opened = { message: { case: "opened" as const, value: window } };

/** A stream that is open until its client ends it. */
const observing: Observing = async function* (requests) {
  await requests.next();
  yield opened;
  while ((await requests.next()).case !== undefined);
};
const recalling: Recalling = async function* (requests) {
  await requests.next();
  yield ready;
  while ((await requests.next()).case !== undefined);
};

for (const code of [Code.Unavailable, Code.Canceled]) {
  void test(`a call that ends as ${Code[code]} is retried by time, not by count`, async () => {
    let tries = 0;
    const recallOnce = (): { done: object } => {
      tries += 1;
      if (tries < 40) throw new ConnectError("away", code);
      return { done: {} };
    };
    await withScripted({ recallOnce, settings: { retry: QUICK } }, async (memory) => {
      await memory.recallOnce("tea");
    });
    assert.equal(tries, 40);
  });
}

void test("a call is not retried if a retry cannot help", async () => {
  for (const [code, callsMs] of [
    [Code.InvalidArgument, 10_000],
    [Code.ResourceExhausted, 10_000],
    [Code.Internal, 10_000],
    [Code.Unauthenticated, 10_000],
    [Code.Unavailable, 0],
  ] as const) {
    let tries = 0;
    const recallOnce = (): never => {
      tries += 1;
      throw new ConnectError("no", code);
    };
    await withScripted({ recallOnce, settings: { retry: { ...QUICK, callsMs } } }, async (memory) => {
      await assert.rejects(memory.recallOnce("tea"), { code });
    });
    assert.equal(tries, 1, Code[code]);
  }
});

void test("a retry waits as long as the server requests", async () => {
  const at: number[] = [];
  const recallOnce = (): { done: object } => {
    at.push(performance.now());
    if (at.length > 1) return { done: {} };
    const details = [{ desc: RetryInfoSchema, value: { retryDelay: { nanos: 40_000_000 } } }];
    throw new ConnectError("away", Code.Unavailable, undefined, details);
  };
  await withScripted({ recallOnce, settings: { retry: QUICK } }, async (memory) => {
    await memory.recallOnce("tea");
  });
  const [first = 0, second = 0] = at;
  assert(second - first >= 38, `the retry waited ${second - first} ms`); // timers fire up to a millisecond early
});

void test("retries keep the request_id", async () => {
  const ids: string[] = [];
  const observeBatch = ({ requestId }: { requestId: string }): object => {
    ids.push(requestId);
    if (ids.length < 3) throw cut();
    return {};
  };
  await withScripted({ observeBatch, settings: { retry: QUICK } }, async (_, client) => {
    await client.streams.observeBatch({ namespace: "ns", memory: "m" });
  });
  assert.equal(new Set(ids).size, 1);
  assert.equal(ids.length, 3);
  assert.notEqual(ids[0], "");
});

for (const kind of ["sync", "async"] as const) {
  void test(`each attempt uses a new token of a ${kind} function`, async () => {
    let given = 0;
    const next = (): string => `t${++given}`;
    const token = kind === "sync" ? next : async (): Promise<string> => { await sleep(1); return next(); };
    const seen: (string | null)[] = [];
    const recallOnce = (_: unknown, { requestHeader }: { requestHeader: Headers }): { done: object } => {
      seen.push(requestHeader.get("authorization"));
      if (seen.length < 3) throw cut();
      return { done: {} };
    };
    await withScripted({ recallOnce, settings: { token, retry: QUICK } }, async (memory) => {
      await memory.recallOnce("tea");
    });
    assert.deepEqual(seen, ["Bearer t1", "Bearer t2", "Bearer t3"]);
  });
}

void test("a stream is reopened with a new token after expiry", async () => {
  let given = 0;
  const seen: (string | null)[] = [];
  const expired = (): ConnectError => new ConnectError("the token has expired", Code.Unauthenticated);
  const observe: Observing[] = [
    async function* (requests, token) {
      seen.push(token);
      await requests.next();
      yield opened;
      throw expired();
    },
    (requests, token) => {
      seen.push(token);
      return observing(requests, token);
    },
  ];
  const recall: Recalling[] = [
    async function* (requests, token) {
      seen.push(token);
      await requests.next();
      yield ready;
      throw expired();
    },
    (requests, token) => {
      seen.push(token);
      return recalling(requests, token);
    },
  ];
  const watch: Watching = async function* (_, { requestHeader }) {
    await Promise.resolve();
    const first = seen.length % 2 === 0;
    seen.push(requestHeader.get("authorization"));
    if (!first) yield { message: { case: "events", value: { events: [{}] } } };
    yield { message: { case: "progress", value: { cursor: {} } } };
    throw expired();
  };
  const settings = { token: (): string => `t${++given}`, retry: QUICK };
  const runs: ((memory: Memory) => Promise<void>)[] = [
    async (memory) => {
      const stream = await memory.observe("p");
      while (stream.connections < 2) await sleep(5);
      await stream.abandon();
    },
    async (memory) => {
      const stream = await memory.recall();
      while (stream.connections < 2) await sleep(5);
      await stream.abandon();
    },
    async (memory) => {
      for await (const { event } of memory.watch({ from: create(CursorSchema) })) {
        assert(event.fragmentId === "");
        break;
      }
    },
  ];
  for (const run of runs) {
    seen.length = given = 0;
    await withScripted({ observe: [...observe], recall: [...recall], watch, settings }, run);
    assert.deepEqual(seen, ["Bearer t1", "Bearer t2"]);
  }
});

void test("a stream is not reopened if its opening was rejected", async () => {
  let given = 0;
  // eslint-disable-next-line require-yield -- the call is rejected before its first response
  const rejectCall = async function* (): AsyncGenerator<never> {
    await Promise.resolve();
    throw new ConnectError("who?", Code.Unauthenticated);
  };
  const settings = { token: (): string => `t${++given}`, retry: QUICK };
  await withScripted({ observe: [rejectCall], recall: [rejectCall], watch: rejectCall, settings }, async (memory) => {
    await assert.rejects(memory.observe("p"), { code: Code.Unauthenticated });
    await assert.rejects(memory.recall(), { code: Code.Unauthenticated });
    const watch = memory.watch({ from: create(CursorSchema) });
    await assert.rejects(watch[Symbol.asyncIterator]().next(), { code: Code.Unauthenticated });
    assert.equal(given, 3);
  });
});

void test("a failing token function fails the call", async () => {
  const sealed = new Error("the vault is sealed");
  const recallOnce = (): { done: object } => ({ done: {} });
  for (const [fails, code, tries] of [
    [sealed, Code.Unauthenticated, 1],
    [new ConnectError("no", Code.PermissionDenied), Code.PermissionDenied, 1],
    [new ConnectError("away", Code.Unavailable), undefined, 3],
  ] as const) {
    let asked = 0;
    const token = (): Promise<string> => (++asked > 2 ? Promise.resolve("good") : Promise.reject(fails));
    await withScripted({ recallOnce, settings: { token, retry: QUICK } }, async (memory) => {
      const answer = memory.recallOnce("tea");
      if (code === undefined) await answer;
      else await assert.rejects(answer, (error) => error instanceof MemstreamError && error.code === code && error.cause === fails);
    });
    assert.equal(asked, tries);
  }
});

void test("an error of a call or a stream keeps its status details", async () => {
  const info = { domain: "memstream.dev", reason: "INVALID_FIELD" };
  const help = { links: [{ description: "a detail type that this package does not know" }] };
  const bad = { fieldViolations: [{ field: "query", description: "is empty" }] };
  const fails = (): never => {
    throw new ConnectError("no", Code.InvalidArgument, { "x-extra": "kept" }, [
      { desc: ErrorInfoSchema, value: info },
      { desc: BadRequestSchema, value: bad },
      { desc: HelpSchema, value: help },
    ]);
  };
  // eslint-disable-next-line require-yield -- the call is rejected before its first response
  const rejectCall = async function* (): AsyncGenerator<never> {
    await Promise.resolve();
    fails();
  };
  await withScripted({ recallOnce: fails, observe: [rejectCall] }, async (memory) => {
    for (const attempt of [() => memory.recallOnce("tea"), () => memory.observe("p")]) {
      await assert.rejects(attempt, (error) => {
        assert(error instanceof MemstreamError);
        assert.equal(error.reason, ErrorReason.INVALID_FIELD);
        assert.deepEqual(error.violations.map((one) => one.field), ["query"]);
        assert.equal(error.findDetails(HelpSchema)[0]?.links[0]?.description, help.links[0]?.description);
        assert.equal(error.findDetails(ErrorInfoSchema)[0]?.reason, "INVALID_FIELD");
        assert.equal(error.metadata.get("x-extra"), "kept");
        return true;
      });
    }
  });
});

/** Runs `act` with a client of a server that accepts connections and never answers. */
async function withSilentServer(act: (client: Client) => Promise<void>): Promise<void> {
  const held: Socket[] = [];
  const server = createSilent((socket) => held.push(socket));
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const address = server.address();
  assert(address !== null && typeof address === "object");
  const client = connect(`127.0.0.1:${address.port}`);
  const late = sleep(LIMIT_MS, undefined, { ref: false }).then(() => { throw new Error("the test did not end in time"); });
  try {
    await Promise.race([act(client), late]);
  } finally {
    client.close();
    for (const socket of held) socket.destroy();
    server.close();
  }
}

const CALLS: Readonly<Record<string, (client: Client, signal: AbortSignal) => Promise<unknown>>> = {
  observe: (client, signal) => client.memory("ns/m").observe("p", { signal }),
  recall: (client, signal) => client.memory("ns/m").recall({ signal }),
  recallOnce: (client, signal) => client.memory("ns/m").recallOnce("tea", { signal }),
  watch: (client, signal) => client.memory("ns/m").watch({ signal })[Symbol.asyncIterator]().next(),
  "a generated call": (client, signal) => client.memories.getMemory({ namespace: "ns", memory: "m" }, { signal }),
  "a generated stream": async (client, signal) => {
    for await (const response of client.memories.exportMemories({}, { signal })) assert.fail(response.$typeName);
  },
};

for (const [name, call] of Object.entries(CALLS)) {
  void test(`an aborted signal ends ${name} with its reason`, async () => {
    await withSilentServer(async (client) => {
      const before = AbortSignal.abort();
      await assert.rejects(call(client, before), (error) => error === before.reason);
      const during = new AbortController();
      const ended = assert.rejects(call(client, during.signal), (error) => error instanceof DOMException && error.name === "AbortError");
      await sleep(20);
      during.abort();
      await ended;
      const reason = new Error("the user has left");
      const named = new AbortController();
      const other = assert.rejects(call(client, named.signal), (error) => error === reason);
      named.abort(reason);
      await other;
      await assert.rejects(call(client, AbortSignal.timeout(20)), { name: "TimeoutError" });
    });
  });
}

void test("an aborted signal ends only its own wait on a stream", async () => {
  await withScripted({ observe: [observing], recall: [recalling] }, async (memory) => {
    const stream = await memory.observe("p");
    const first = await stream.send("one");
    const queries = await memory.recall();
    const waits: ((signal: AbortSignal) => Promise<unknown>)[] = [
      (signal) => stream.send("no room", { signal }),
      (signal) => stream.flush({ signal }),
      (signal) => queries.query("tea", { signal }),
      (signal) => queries.subscribe("tea", { signal })[Symbol.asyncIterator]().next(),
      (signal) => queries.close({ signal }),
      (signal) => stream.close({ signal }),
    ];
    const closed = assert.rejects(queries.query("not aborted"), ClosedError); // the aborted close ends the stream
    for (const wait of waits) {
      const given = new AbortController();
      const ended = assert.rejects(wait(given.signal), { name: "AbortError" });
      await sleep(5);
      given.abort();
      await ended;
    }
    await closed;
    await assert.rejects(first.stored, ClosedError);
  });
});

void test("the signal of a stream ends it and all its waits", async () => {
  await withScripted({ observe: [observing], recall: [recalling] }, async (memory) => {
    const given = new AbortController();
    const { signal } = given;
    const stream = await memory.observe("p", { signal });
    const queries = await memory.recall({ signal });
    const sent = await stream.send("one");
    const waits = [sent.stored, stream.flush(), queries.query("tea"), queries.subscribe("tea")[Symbol.asyncIterator]().next()];
    const ended = waits.map((wait) => assert.rejects(wait, { name: "AbortError" }));
    await sleep(5);
    given.abort();
    await Promise.all(ended);
    await assert.rejects(stream.send("late"), { name: "AbortError" });
    await assert.rejects(queries.query("late"), { name: "AbortError" });
  });
});

void test("a closed client ends its calls and rejects new ones", async () => {
  const watch: Watching = async function* (_, { signal }) {
    await once(signal, "abort");
    yield {};
  };
  const script = { observe: [observing], recall: [recalling], watch, settings: { retry: { delayMinMs: 9e6, delayMaxMs: 9e6, callsMs: 9e9 }, timeoutMs: 9e8 } };
  await withScripted(script, async (memory, client) => {
    const stream = await memory.observe("p");
    const queries = await memory.recall();
    const ends = [
      stream.send("one").then((sent) => sent.stored),
      queries.query("tea"),
      memory.watch({ from: create(CursorSchema) })[Symbol.asyncIterator]().next(),
      memory.recallOnce("tea"), // waits for its retry
    ].map((end) => assert.rejects(end, ClosedError));
    await sleep(20);
    client.close();
    await Promise.all(ends);
    await assert.rejects(memory.recallOnce("tea"), ClosedError);
    await assert.rejects(memory.observe("q"), ClosedError);
  });
});

void test("connect refuses what is no target", () => {
  for (const target of [
    "", "http://127.0.0.1:7700", "https://memory.example", "a b:1", "host:", "host:port", "host:0", "host:65536", ":7700",
    "host/x", "::1", "a:1:2", "u@h:1", "127.0.0.1:7700 ",
  ]) {
    assert.throws(() => connect(target), (error) => {
      assert(error instanceof ConnectError);
      assert.equal(error.code, Code.InvalidArgument);
      return true;
    });
  }
});

void test("connect takes addresses", () => {
  for (const target of ["127.0.0.1:7700", "memory.example", "[::1]:7700", "my_host:1"]) connect(target).close();
});

void test("createMemory sends what is given", async () => {
  const sent: CreateMemoryRequest[] = [];
  const createMemory = (request: CreateMemoryRequest): object => {
    sent.push(request);
    return {};
  };
  await withScripted({ createMemory }, async (_memory, client) => {
    const policy = { recall: { limit: 7 } };
    const made = await client.createMemory("ns/new", {
      kind: MemoryKind.LONG_TERM, profile: Profile.DBGPT, policy, labels: { team: "core" },
    });
    assert.deepEqual(made.path, { namespace: "ns", name: "new" });
    await client.ensureMemory("ns/new");
    await assert.rejects(client.createMemory("ns/new", { labels: { team: 7 } } as object), MemstreamError);
    await assert.rejects(client.createMemory("ns/new", { policy: { recal: {} } } as object), MemstreamError);
    await assert.rejects(client.createMemory("ns/new", { kinds: 1 } as object), MemstreamError);
    assert.deepEqual(policy, { recall: { limit: 7 } });
  });
  const [first, second] = sent;
  assert.equal(first?.kind, MemoryKind.LONG_TERM);
  assert.equal(first.policy?.profile, Profile.DBGPT);
  assert.equal(first.policy.recall?.limit, 7);
  assert.deepEqual(first.labels, { team: "core" });
  assert.equal(first.existOk, false);
  assert.equal(second?.existOk, true);
  assert.equal(second.policy, undefined);
  assert.equal(sent.length, 2);
});
