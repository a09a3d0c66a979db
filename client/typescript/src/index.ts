/**
 * The client of memstream, a memory server for agents.
 *
 * `connect` gives a `Client` with the generated clients of every service, whose unary calls carry the token, the routing
 * header and a time limit, and are repeated while the server is unavailable. `Client.memory` gives a `Memory` with the
 * three streams. What fails rejects with a `MemstreamError`; what a caller's own signal ends, with that signal's reason,
 * by default an AbortError, as `fetch` does.
 */
import type { Client as GeneratedClient } from "@connectrpc/connect";

import type { ConversationService } from "./gen/memstream/v1/conversation_service_pb.js";
import type { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import type { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import type { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import type { StreamService } from "./gen/memstream/v1/stream_service_pb.js";
import { protocolViolation } from "./errors.js";
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
export type { Happening, WatchOptions } from "./watch.js";

/** A client of the server at `target` ("host:port"). Nothing is sent yet. */
export function connect(target: string, settings: Settings = {}): Client {
  return new Client(new Link(target, settings));
}

/** A connection to a server; made by `connect`. */
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

  /** The memory "namespace/name", without asking whether it exists. */
  memory(path: string): Memory {
    return new Memory(this.link, memoryPath(path));
  }

  /** Makes the memory "namespace/name" with the default policy unless it exists. */
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

/** One memory of a server; made by `Client.memory`. */
export class Memory {
  constructor(
    private readonly link: Link,
    readonly path: MemoryPath,
  ) {}

  /**
   * Opens a producer's stream; resolves once the server has answered. The name is lasting and one process's at a time:
   * the server remembers its numbers.
   */
  async observe(producer: string, options: ObserveOptions = {}): Promise<ObserveStream> {
    const stream = new ObserveStream(this.link, this.path, producer, options);
    await stream.opened();
    return stream;
  }

  /** Opens a stream of queries; resolves once the server has answered. */
  async recall(options: RecallOptions = {}): Promise<RecallStream> {
    const stream = new RecallStream(this.link, this.path, options);
    await stream.opened();
    return stream;
  }

  /** Asks one query, without a stream. */
  async recallOnce(what: Query, { signal, timeoutMs }: QueryOptions = {}): Promise<Answer> {
    const { namespace, name } = this.path;
    const request = { namespace, memory: name, query: toQuery(what) };
    const limits = { ...(signal && { signal }), ...(timeoutMs !== undefined && { timeoutMs }) };
    const { recollections, done } = await this.link.streams.recallOnce(request, limits);
    if (!done) throw protocolViolation("the server's answer is not whole");
    return toAnswer(recollections ? [recollections] : [], done);
  }

  /** Every event of the memory, once. */
  watch(options: WatchOptions = {}): Watch {
    return new Watch(this.link, this.path, options);
  }
}
