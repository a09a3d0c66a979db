/** The options of the transport do what they are set for: an unknown or ineffective one is ignored in silence. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:net";
import type { AddressInfo, Socket } from "node:net";
import { test } from "node:test";
import { createServer as createTlsServer } from "node:tls";

import { Code, ConnectError } from "@connectrpc/connect";

import type { RecallOnceRequest } from "../gen/memstream/v1/stream_service_pb.js";
import { connect } from "../index.js";
import { pings } from "../link.js";
import { LIMIT_MS, withScripted } from "./scripted.js";

const ONCE = { retry: { callsMs: 0 }, timeoutMs: 600_000 };
/** SETTINGS, and the acknowledgement of the client's. */
const SETTINGS = Buffer.from("000000040000000000" + "000000040100000000", "hex");
const PING_TYPE = 6;
const ACK = 1;

/** Runs `act` with the address of a server of hand-written HTTP/2, which `handle` gets each connection of. */
async function withRaw(handle: (socket: Socket) => void, act: (address: string) => Promise<void>): Promise<void> {
  const sockets = new Set<Socket>();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => undefined);
    handle(socket);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  try {
    await act(`127.0.0.1:${(server.address() as AddressInfo).port}`);
  } finally {
    for (const socket of sockets) socket.destroy();
    server.close();
  }
}

/** Calls `ping` for each PING of the client, once its preface has come. */
function readPings(socket: Socket, ping: (payload: Buffer) => void): void {
  let read = Buffer.alloc(0);
  let isPast = false;
  socket.on("data", (bytes: Buffer) => {
    read = Buffer.concat([read, bytes]);
    if (!isPast && read.length >= 24) [isPast, read] = [true, read.subarray(24)];
    while (isPast && read.length >= 9 && read.length >= 9 + read.readUIntBE(0, 3)) {
      const length = read.readUIntBE(0, 3);
      if (read[3] === PING_TYPE && !((read[4] ?? 0) & ACK)) ping(Buffer.from(read.subarray(9, 9 + length)));
      read = read.subarray(9 + length);
    }
  });
}

void test("a server that answers no ping is noticed", { timeout: 3 * LIMIT_MS }, async (t) => {
  const before = pings.timeoutMs;
  pings.timeoutMs = 300;
  t.after(() => { pings.timeoutMs = before; });
  await withRaw((socket) => { socket.write(SETTINGS); }, async (address) => {
    const client = connect(address, { ...ONCE, keepaliveMs: 200 });
    await assert.rejects(
      client.server.getServerInfo({}),
      (thrown) => thrown instanceof ConnectError && [Code.Unavailable, Code.Aborted, Code.Canceled].includes(thrown.code),
    );
    client.close();
  });
});

void test("a server that answers the pings is waited for", { timeout: 3 * LIMIT_MS }, async (t) => {
  const before = pings.timeoutMs;
  pings.timeoutMs = LIMIT_MS;
  t.after(() => { pings.timeoutMs = before; });
  let answered = 0;
  let enough = (): void => undefined;
  const five = new Promise<void>((resolve) => { enough = resolve; });
  await withRaw((socket) => {
    socket.write(SETTINGS);
    readPings(socket, (payload) => {
      socket.write(Buffer.concat([Buffer.from("000008060100000000", "hex"), payload]));
      answered += 1;
      if (answered === 5) enough();
    });
  }, async (address) => {
    const client = connect(address, { ...ONCE, keepaliveMs: 100 });
    let ended = false;
    const call = client.server.getServerInfo({}).catch(() => undefined).finally(() => { ended = true; });
    await five;
    assert.equal(ended, false);
    client.close();
    await call;
  });
});

const exhausted = (thrown: unknown): boolean => thrown instanceof ConnectError && thrown.code === Code.ResourceExhausted;

void test("one call asks several memories", { timeout: LIMIT_MS }, async () => {
  let asked: unknown[] = [];
  const recallOnce = ({ memory, query }: RecallOnceRequest): { done: object } => {
    asked = [memory, query?.partial, ...(query?.scopes ?? []).map(({ memories, weight }) => [memories.value, weight])];
    return { done: {} };
  };
  await withScripted({ recallOnce, settings: ONCE }, async (_memory, client) => {
    await client.recallOnce(["user/bob", { memories: { case: "prefix", value: "team/" }, weight: 0.5 }], "tea", { partial: true });
  });
  assert.deepEqual(asked, ["", true, ["user/bob", undefined], ["team/", 0.5]]);
});

void test("an answer may have some megabytes, and no more than 64", { timeout: 6 * LIMIT_MS }, async () => {
  let size = 6 << 20;
  const recallOnce = (): { done: { queryId: string } } => ({ done: { queryId: "q".repeat(size) } });
  await withScripted({ recallOnce, settings: ONCE }, async (memory) => {
    await memory.recallOnce("tea");
    size = 64 << 20;
    await assert.rejects(memory.recallOnce("tea"), exhausted);
  });
});

void test("a message over writeBytesMax is not sent", { timeout: 3 * LIMIT_MS }, async () => {
  let calls = 0;
  const recallOnce = (): { done: object } => {
    calls += 1;
    return { done: {} };
  };
  await withScripted({ recallOnce, settings: { ...ONCE, writeBytesMax: 1_000 } }, async (memory) => {
    await memory.recallOnce("t".repeat(500));
    await assert.rejects(memory.recallOnce("t".repeat(1_001)), exhausted);
  });
  assert.equal(calls, 1);
});

void test("the server gets the name that the client was given", { timeout: 3 * LIMIT_MS }, async () => {
  const names: string[] = [];
  const server = createTlsServer({
    SNICallback: (name, done) => {
      names.push(name);
      done(new Error("no certificate"));
    },
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const address = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  for (const servername of [undefined, "memory.example"]) {
    const client = connect(address, { ...ONCE, tls: servername === undefined ? true : { servername } });
    await assert.rejects(client.server.getServerInfo({}));
    client.close();
  }
  server.close();
  assert.deepEqual(names, ["memory.example"]);
});
