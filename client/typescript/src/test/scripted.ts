/** A server whose calls are handled by the functions of a test. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:http2";
import { setTimeout as sleep } from "node:timers/promises";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import type { HandlerContext, ServiceImpl } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";

import { MemoryService } from "../gen/memstream/v1/memory_service_pb.js";
import { StreamService } from "../gen/memstream/v1/stream_service_pb.js";
import type {
  ObserveRequest,
  ObserveResponseSchema,
  RecallRequest,
  RecallResponseSchema,
  WatchRequest,
  WatchResponseSchema,
} from "../gen/memstream/v1/stream_service_pb.js";
import { connect } from "../index.js";
import type { Client, Memory, Settings } from "../index.js";

export type Observing = (requests: Reader<ObserveRequest>, token: string | null) => AsyncGenerator<MessageInitShape<typeof ObserveResponseSchema>>;
export type Watching = (request: WatchRequest, context: HandlerContext) => AsyncGenerator<MessageInitShape<typeof WatchResponseSchema>>;
export type Recalling = (requests: Reader<RecallRequest>, token: string | null) => AsyncGenerator<MessageInitShape<typeof RecallResponseSchema>>;

export const LIMIT_MS = 60_000;
export const cut = (): ConnectError => new ConnectError("cut", Code.Unavailable);

/** Reads the client's requests one by one. */
export class Reader<T extends ObserveRequest | RecallRequest> {
  private readonly reading: AsyncIterator<T, unknown>;

  constructor(requests: AsyncIterable<T, unknown>) {
    this.reading = requests[Symbol.asyncIterator]();
  }

  async next(): Promise<T["message"] | { case: undefined }> {
    const read = await this.reading.next();
    return read.done ? { case: undefined } : read.value.message;
  }
}

/** Runs `act` with a memory of a server whose calls are handled by the given functions, one after the other. */
export async function withScripted(
  script: {
    observe?: Observing[];
    recall?: Recalling[];
    recallOnce?: ServiceImpl<typeof StreamService>["recallOnce"];
    observeBatch?: ServiceImpl<typeof StreamService>["observeBatch"];
    createMemory?: ServiceImpl<typeof MemoryService>["createMemory"];
    watch?: Watching;
    timeoutMs?: number;
    settings?: Settings;
  },
  act: (memory: Memory, client: Client) => Promise<void>,
): Promise<void> {
  const away = (): never => { throw cut(); };
  const { observe = [], recall = [], recallOnce = away, observeBatch = away, createMemory = away, watch = away } = script;
  const next = <T>(connections: T[]): T => {
    const connection = connections.shift();
    if (connection === undefined) throw cut();
    return connection;
  };
  const server = createServer(
    connectNodeAdapter({
      routes: (router) => router.service(MemoryService, { createMemory }).service(StreamService, {
        observe: (requests, { requestHeader }) =>
          next(observe)(new Reader(requests), requestHeader.get("authorization")),
        recall: (requests, { requestHeader }) => next(recall)(new Reader(requests), requestHeader.get("authorization")),
        recallOnce,
        observeBatch,
        watch,
      }),
    }),
  );
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const address = server.address();
  assert(address !== null && typeof address === "object");
  const client = connect(`127.0.0.1:${address.port}`, {
    timeoutMs: script.timeoutMs ?? LIMIT_MS,
    retry: { laterMs: LIMIT_MS, delayMinMs: 1, delayMaxMs: 10 },
    ...script.settings,
  });
  const late = sleep(LIMIT_MS, undefined, { ref: false }).then(() => { throw new Error("the test did not end in time"); });
  try {
    await Promise.race([act(client.memory("ns/m"), client), late]);
  } finally {
    client.close();
    server.close();
  }
}
