/**
 * The client of memstream, a memory server for agents.
 *
 * `connect` returns a `Client` with the generated clients of every service. Their unary calls carry the token, the routing
 * header and a timeout, and are retried while the server is unavailable. `Client.memory` returns a `Memory` with the three
 * streams. A failure rejects with a `MemstreamError`; an aborted signal of the caller rejects with the signal's reason, by
 * default an AbortError, as `fetch` does.
 */
import type { Client as GeneratedClient } from "@connectrpc/connect";

import type { ConversationService } from "./gen/memstream/v1/conversation_service_pb.js";
import type { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import type { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import type { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import type { StreamService } from "./gen/memstream/v1/stream_service_pb.js";
import { protocolViolationError } from "./errors.js";
import { Link, memoryPath } from "./link.js";
import type { MemoryPath, Settings } from "./link.js";
import { ObserveStream } from "./observe.js";
import type { ObserveOptions } from "./observe.js";
import { RecallStream, toAnswer, toQuery } from "./recall.js";
import type { Answer, Query, QueryOptions, RecallOptions } from "./recall.js";
import { Watch } from "./watch.js";
import type { WatchOptions } from "./watch.js";

export { ErrorReason } from "./gen/memstream/v1/error_pb.js";
export { EventType } from "./gen/memstream/v1/event_pb.js";
export { AckLevel } from "./gen/memstream/v1/stream_service_pb.js";
export { RETRY } from "./backoff.js";
export type { Retry } from "./backoff.js";
export { asError, ClosedError, MemstreamError, ServerBehindError } from "./errors.js";
export type { Violation } from "./errors.js";
export type { Resumption } from "./ledger.js";
export type { Token } from "./calls.js";
export type { MemoryPath, Pem, Settings, Tls } from "./link.js";
export { ObserveStream } from "./observe.js";
export type { Observable, ObserveOptions, WaitOptions } from "./observe.js";
export { RecallStream } from "./recall.js";
export type { Answer, Query, QueryOptions, RecallOptions } from "./recall.js";
export type { Sent } from "./sent.js";
export { StandingQuery } from "./standing.js";
export type { AnswerChange, StandingOptions } from "./standing.js";
export { Watch } from "./watch.js";
export type { WatchedEvent, WatchOptions } from "./watch.js";

/** Returns a client of the server at `target` ("host:port"). It does not connect yet. */
export function connect(target: string, settings: Settings = {}): Client {
  return new Client(new Link(target, settings));
}

/** A connection to a server, created by `connect`. */
export class Client {
  readonly streams: GeneratedClient<typeof StreamService>;
  readonly memories: GeneratedClient<typeof MemoryService>;
  readonly conversations: GeneratedClient<typeof ConversationService>;
  readonly operations: GeneratedClient<typeof OperationService>;
  readonly server: GeneratedClient<typeof ServerService>;

  constructor(private readonly link: Link) {
    ({
      streams: this.streams,
      memories: this.memories,
      conversations: this.conversations,
      operations: this.operations,
      server: this.server,
    } = link);
  }

  /** Returns the memory "namespace/name" without checking that it exists. */
  memory(path: string): Memory {
    return new Memory(this.link, memoryPath(path));
  }

  /** Creates the memory "namespace/name" with the default policy unless it exists. */
  async ensureMemory(path: string): Promise<Memory> {
    const { namespace, name } = memoryPath(path);
    await this.memories.createMemory({ namespace, memory: name, existOk: true });
    return this.memory(path);
  }

  /** Ends the connection and every stream on it. */
  close(): void {
    this.link.close();
  }
}

/** One memory of a server, created by `Client.memory`. */
export class Memory {
  constructor(
    private readonly link: Link,
    readonly path: MemoryPath,
  ) {}

  /**
   * Opens a producer's stream; resolves when the server has answered. Keep the producer's name across restarts, and use
   * it in one process at a time: the server remembers its numbers.
   */
  async observe(producer: string, options: ObserveOptions = {}): Promise<ObserveStream> {
    const stream = new ObserveStream(this.link, this.path, producer, options);
    await stream.waitUntilOpen();
    return stream;
  }

  /** Opens a stream of queries; resolves when the server has answered. */
  async recall(options: RecallOptions = {}): Promise<RecallStream> {
    const stream = new RecallStream(this.link, this.path, options);
    await stream.waitUntilOpen();
    return stream;
  }

  /** Sends one query, without a stream. */
  async recallOnce(what: Query, { signal, timeoutMs }: QueryOptions = {}): Promise<Answer> {
    const { namespace, name } = this.path;
    const request = { namespace, memory: name, query: toQuery(what) };
    const limits = { ...(signal && { signal }), ...(timeoutMs !== undefined && { timeoutMs }) };
    const { recollections, done } = await this.link.streams.recallOnce(request, limits);
    if (!done) throw protocolViolationError("the server's answer is incomplete");
    return toAnswer(recollections ? [recollections] : [], done);
  }

  /** Returns every event of the memory once. */
  watch(options: WatchOptions = {}): Watch {
    return new Watch(this.link, this.path, options);
  }
}
