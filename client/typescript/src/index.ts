/**
 * The client of memstream, a memory server for agents.
 *
 * `connect` returns a `Client` with the generated clients of every service. Their unary calls carry the token, the routing
 * header and a timeout, and are retried while the server is unavailable. `Client.memory` returns a `Memory` with the three
 * streams. A failure rejects with a `MemstreamError`; an aborted signal of the caller rejects with the signal's reason, by
 * default an AbortError, as `fetch` does.
 */
import { randomUUID } from "node:crypto";

import { clone } from "@bufbuild/protobuf";
import type { MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import type { Client as GeneratedClient } from "@connectrpc/connect";

import type { BlockService } from "./gen/memstream/v1/block_service_pb.js";
import type { ContextService } from "./gen/memstream/v1/context_service_pb.js";
import type {
  Conversation as ConversationInfo,
  ConversationService,
  State,
  TransactionResult,
} from "./gen/memstream/v1/conversation_service_pb.js";
import type { MemoryKind, PolicySchema, Profile } from "./gen/memstream/v1/memory_pb.js";
import { CreateMemoryRequestSchema } from "./gen/memstream/v1/memory_service_pb.js";
import type { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import type { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import type { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import { RecallScopeSchema } from "./gen/memstream/v1/scope_pb.js";
import { RecallQuerySchema } from "./gen/memstream/v1/stream_service_pb.js";
import type { RecallOnceRequestSchema, StreamService } from "./gen/memstream/v1/stream_service_pb.js";
import type { Ack } from "./gen/memstream/v1/stream_service_pb.js";
import { toAnswer } from "./answer.js";
import type { Answer } from "./answer.js";
import { checkedMessage, checkOptions } from "./checks.js";
import { Context, CONTEXT_OPTIONS, toContextRequest } from "./context.js";
import type { ContextOptions } from "./context.js";
import { Conversation, getStates, listConversations, setState, writeTogether } from "./conversation.js";
import type { ConversationQuery, StateCondition, StateKey, Write } from "./conversation.js";
import { protocolViolationError } from "./errors.js";
import { Link, memoryPath } from "./link.js";
import type { MemoryPath, Settings } from "./link.js";
import { ObserveStream, QUERY_OPTIONS, toObservation } from "./observe.js";
import type { Observable, ObserveOptions, QueryOptions } from "./observe.js";
import { RecallStream, toQuery } from "./recall.js";
import type { Query, RecallOptions } from "./recall.js";
import { Watch } from "./watch.js";
import type { WatchOptions } from "./watch.js";

export { ErrorReason } from "./gen/memstream/v1/error_pb.js";
export { ContextPartKind, ContextReason } from "./gen/memstream/v1/context_service_pb.js";
export { EventType } from "./gen/memstream/v1/event_pb.js";
export { MemoryKind, Profile } from "./gen/memstream/v1/memory_pb.js";
export { AckLevel } from "./gen/memstream/v1/stream_service_pb.js";
export type { Answer } from "./answer.js";
export { Context } from "./context.js";
export type {
  AnthropicContext,
  AnthropicText,
  ContextOptions,
  ModelMessage,
  OpenAIChatContext,
  OpenAIContext,
  RecordOptions,
  RenderOptions,
  TokenBounds,
} from "./context.js";
export { Conversation } from "./conversation.js";
export type {
  AppendCondition,
  ConversationChange,
  ConversationQuery,
  DeleteCondition,
  MessageQuery,
  NewMessage,
  StateCondition,
  StateKey,
  Write,
} from "./conversation.js";
export { StateScope } from "./gen/memstream/v1/conversation_service_pb.js";
export type { State, TransactionResult } from "./gen/memstream/v1/conversation_service_pb.js";
export { RETRY } from "./backoff.js";
export type { Retry } from "./backoff.js";
export { asError, ClosedError, MemstreamError, ServerBehindError } from "./errors.js";
export type { Violation } from "./errors.js";
export type { Resumption } from "./ledger.js";
export type { Token } from "./calls.js";
export type { MemoryPath, Pem, Settings, Tls } from "./link.js";
export { memoryName, userIdOf } from "./names.js";
export { ObserveStream } from "./observe.js";
export type { Observable, ObserveOptions, QueryOptions, WaitOptions } from "./observe.js";
export { RecallStream } from "./recall.js";
export type { Query, RecallOptions } from "./recall.js";
export type { Sent } from "./sent.js";
export { StandingQuery } from "./standing.js";
export type { AnswerChange, StandingOptions } from "./standing.js";
export { Watch } from "./watch.js";
export type { WatchedEvent, WatchOptions } from "./watch.js";

/** Returns a client of the server at `target` ("host:port"). It does not connect yet. */
export function connect(target: string, settings: Settings = {}): Client {
  checkOptions("settings", settings, { token: true, tls: true, timeoutMs: true, retry: true, keepaliveMs: true, writeBytesMax: true, tracing: true });
  return new Client(new Link(target, settings));
}

/** A connection to a server, created by `connect`. */
export class Client {
  readonly streams: GeneratedClient<typeof StreamService>;
  readonly memories: GeneratedClient<typeof MemoryService>;
  readonly blocks: GeneratedClient<typeof BlockService>;
  readonly contexts: GeneratedClient<typeof ContextService>;
  readonly conversations: GeneratedClient<typeof ConversationService>;
  readonly operations: GeneratedClient<typeof OperationService>;
  readonly server: GeneratedClient<typeof ServerService>;

  constructor(private readonly link: Link) {
    ({
      streams: this.streams,
      memories: this.memories,
      blocks: this.blocks,
      contexts: this.contexts,
      conversations: this.conversations,
      operations: this.operations,
      server: this.server,
    } = link);
  }

  /** Returns the memory "namespace/name" without checking that it exists. */
  memory(path: string): Memory {
    return new Memory(this.link, memoryPath(path));
  }

  /** Returns the conversation "namespace/name" without checking that it exists. */
  conversation(path: string): Conversation {
    return new Conversation(this.link, memoryPath(path, "conversation"));
  }

  /** The conversations of a namespace that match, over all pages. */
  listConversations(namespace: string, query: ConversationQuery = {}): AsyncGenerator<ConversationInfo, void, undefined> {
    return listConversations(this.link, namespace, query);
  }

  /**
   * Writes and deletes messages, conversations, state and fragments in one transaction, all or none; the result of each.
   * `memory`: the one that fragments are put into.
   */
  async writeTogether(namespace: string, writes: readonly Write[], memory = ""): Promise<TransactionResult[]> {
    return writeTogether(this.link, namespace, writes, memory);
  }

  /** A state document; undefined if there is none. */
  async getState(namespace: string, key: StateKey): Promise<State | undefined> {
    return (await getStates(this.link, namespace, [key]))[0];
  }

  /** Those of the state documents that exist, in the order of the keys. */
  async getStates(namespace: string, keys: readonly StateKey[]): Promise<State[]> {
    return getStates(this.link, namespace, keys);
  }

  /** Writes a state document, any JSON as text; the answer has no document. */
  async setState(namespace: string, key: StateKey, document: string, condition: StateCondition = {}): Promise<State> {
    return setState(this.link, namespace, key, document, condition);
  }

  /** Deletes a state document, and returns whether there was one. `etag`: that of the document; empty for any. */
  async deleteState(namespace: string, key: StateKey, etag = ""): Promise<boolean> {
    return (await this.conversations.deleteState({ namespace, ...key, etag })).deleted;
  }

  /** Creates the memory "namespace/name". */
  async createMemory(path: string, options: CreateOptions = {}): Promise<Memory> {
    checkOptions("options", options, { kind: true, profile: true, policy: true, labels: true, existOk: true });
    const { namespace, name } = memoryPath(path);
    const { profile, policy, ...others } = options;
    const given = policy || profile !== undefined ? { policy: { ...policy, ...(profile !== undefined && { profile }) } } : {};
    await this.memories.createMemory(
      checkedMessage("options", CreateMemoryRequestSchema, { namespace, memory: name, ...others, ...given }),
    );
    return this.memory(path);
  }

  /** Creates the memory "namespace/name" with the default policy unless it exists. */
  async ensureMemory(path: string): Promise<Memory> {
    return this.createMemory(path, { existOk: true });
  }

  /**
   * Sends one query over several memories, without a stream: "namespace/name", or scopes with weight, limit, filter, prefix
   * or labels. Rejects for a memory that does not exist or that you may not recall; with `partial`, leaves it out.
   */
  async recallOnce(scopes: readonly RecallScope[], what: Query, options: ScopesOptions = {}): Promise<Answer> {
    checkOptions("options", options, { partial: true, ...QUERY_OPTIONS });
    const query = clone(RecallQuerySchema, toQuery(what));
    query.scopes = scopes.map((one) => toScope(one));
    query.partial = options.partial ?? false;
    return sendQuery(this.link, { query }, options);
  }

  /**
   * Builds what an agent sends to its model before a turn: blocks, the end of the conversation, memories and the question,
   * within `budget` tokens. With `after`, the context of the turn before, the text begins with its text, so that the
   * model's prompt cache reads it, or `brokenBy` says why not.
   */
  async context(scopes: readonly RecallScope[], question: string, options: ContextOptions = {}): Promise<Context> {
    checkOptions("options", options, CONTEXT_OPTIONS);
    const { signal, timeoutMs, ...asked } = options;
    const request = toContextRequest(question, asked);
    request.scopes = scopes.map((one) => toScope(one));
    return new Context(this.link, request, await this.contexts.context(request, callLimits({ signal, timeoutMs })));
  }

  /** Ends the connection and every stream on it. */
  close(): void {
    this.link.close();
  }
}

/** Memories of a recall over several: "namespace/name", or a message. */
export type RecallScope = string | MessageInitShape<typeof RecallScopeSchema>;

/** Options of `Client.recallOnce`. */
export interface ScopesOptions extends QueryOptions {
  /** Leaves out named memories that do not exist or that you may not recall. */
  readonly partial?: boolean;
}

function toScope(one: RecallScope): MessageShape<typeof RecallScopeSchema> {
  return checkedMessage("scopes", RecallScopeSchema, typeof one === "string" ? { memories: { case: "memory", value: one } } : one);
}

async function sendQuery(
  link: Link,
  request: MessageInitShape<typeof RecallOnceRequestSchema>,
  options: QueryOptions,
): Promise<Answer> {
  const { recollections, done } = await link.streams.recallOnce(request, callLimits(options));
  if (!done) throw protocolViolationError("the server's answer is incomplete");
  return toAnswer(recollections ? [recollections] : [], done);
}

/** Options of `Client.createMemory`; those that are not given take the server's defaults. */
export interface CreateOptions {
  /** Which tiers the memory has. Default: a hybrid memory, with all of them. */
  readonly kind?: MemoryKind;
  /** The set of defaults of the policy. */
  readonly profile?: Profile;
  /** Fields of the policy; unset ones take the profile's defaults. */
  readonly policy?: MessageInitShape<typeof PolicySchema>;
  /** Names and values of your own. */
  readonly labels?: Record<string, string>;
  /**
   * Accepts an existing memory if its kind, policy fields and labels equal the given ones; what is not given is not
   * compared. The error of another one has the reason MEMORY_EXISTS and names the differences.
   */
  readonly existOk?: boolean;
}

/** Options of `Memory.observeBatch`. */
export interface BatchOptions extends QueryOptions {
  /** Identifies the batch, so that a repeat is harmless. Default: a new one, for the retries of this call. */
  readonly requestId?: string;
  /** Session of observations that have none. */
  readonly session?: string;
}

function callLimits({ signal, timeoutMs }: QueryOptions): { signal?: AbortSignal; timeoutMs?: number } {
  return { ...(signal && { signal }), ...(timeoutMs !== undefined && { timeoutMs }) };
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
    checkOptions("options", options, { session: true, ackLevel: true, outcomes: true, related: true, knownSequence: true, signal: true });
    const stream = new ObserveStream(this.link, this.path, producer, options);
    await stream.waitUntilOpen();
    return stream;
  }

  /** Opens a stream of queries; resolves when the server has answered. */
  async recall(options: RecallOptions = {}): Promise<RecallStream> {
    checkOptions("options", options, { session: true, signal: true });
    const stream = new RecallStream(this.link, this.path, options);
    await stream.waitUntilOpen();
    return stream;
  }

  /**
   * Sends observations without a producer, and resolves when all are stored; the acknowledgement lists the rejected ones.
   * A repeat with the same `requestId` stores nothing again.
   */
  async observeBatch(observations: readonly Observable[], options: BatchOptions = {}): Promise<Ack> {
    checkOptions("options", options, { requestId: true, session: true, ...QUERY_OPTIONS });
    const { namespace, name } = this.path;
    const { requestId = randomUUID(), session = "" } = options;
    const sent = { namespace, memory: name, requestId, session, observations: observations.map(toObservation) };
    const { ack } = await this.link.streams.observeBatch(sent, callLimits(options));
    if (!ack) throw protocolViolationError("the server's answer is incomplete");
    return ack;
  }

  /** Sends one query, without a stream. */
  async recallOnce(what: Query, options: QueryOptions = {}): Promise<Answer> {
    checkOptions("options", options, QUERY_OPTIONS);
    const { namespace, name } = this.path;
    return sendQuery(this.link, { namespace, memory: name, query: toQuery(what) }, options);
  }

  /** Returns every event of the memory once. */
  watch(options: WatchOptions = {}): Watch {
    checkOptions("options", options, { from: true, types: true, includeFragments: true, signal: true });
    return new Watch(this.link, this.path, options);
  }
}
