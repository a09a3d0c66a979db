/// <reference lib="esnext.disposable" preserve="true" />
/** The Recall stream: many queries in flight, each answered, cancelled and resent independently. */
import { clone, create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import { toAnswer } from "./answer.js";
import type { Answer } from "./answer.js";
import { Backoff, repeatUntilDone } from "./backoff.js";
import { Changes, raceSignal } from "./changes.js";
import { checkedMessage, checkOptions } from "./checks.js";
import { Context, CONTEXT_OPTIONS, toContextRequest } from "./context.js";
import type { ContextOptions } from "./context.js";
import {
  asError,
  ClosedError,
  deadlineError,
  fromStatus,
  isCut,
  notOpenedError,
  protocolViolationError,
  shuttingDownError,
  unavailableError,
} from "./errors.js";
import type { MemstreamError } from "./errors.js";
import type { ContextRequest, ContextResponse } from "./gen/memstream/v1/context_service_pb.js";
import { RecallScopeSchema } from "./gen/memstream/v1/scope_pb.js";
import { ContextQuerySchema, RecallQuerySchema, RecallRequestSchema } from "./gen/memstream/v1/stream_service_pb.js";
import type {
  ContextAnswer,
  ContextQuery,
  RecallDone,
  Recollections,
  RecallQuery,
  RecallRequest,
  RecallResponse,
} from "./gen/memstream/v1/stream_service_pb.js";
import type { Link, MemoryPath } from "./link.js";
import { durationMs } from "./link.js";
import { QUERY_OPTIONS } from "./observe.js";
import type { QueryOptions, WaitOptions } from "./observe.js";
import { StandingState, StandingQuery } from "./standing.js";
import type { StandingOptions } from "./standing.js";

/** Queries in flight, if the server does not announce a limit. */
const IN_FLIGHT_MAX = 64;
/** Limits the time for which a stream drains. An object for the tests. */
export const drains = { graceMaxMs: 1_000 };
/** The longest delay of a timer. */
const TIMEOUT_MAX_MS = 2 ** 31 - 1;
/** Delay before resending a standing query after a transient error, if the server gives none. */
const RESEND_DELAY_MS = 1_000;

/** A query: text, or a message of the contract. */
export type Query = string | MessageInitShape<typeof RecallQuerySchema>;

/** Options of a Recall stream. */
export interface RecallOptions {
  /** The session for which the queries are made. */
  readonly session?: string;
  /** Ends the stream: its opening and every later wait on it rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** Returns the query as a message. */
export function toQuery(what: Query): RecallQuery {
  return checkedMessage(
    "query",
    RecallQuerySchema,
    typeof what === "string" ? { observation: { case: "text", value: what } } : what,
  );
}

/** Returns the query as a message with the timeout at which the server stops it. */
function withTimeout(what: Query, timeoutMs: number): RecallQuery {
  const query = clone(RecallQuerySchema, toQuery(what));
  if (timeoutMs > 0 && timeoutMs <= TIMEOUT_MAX_MS) query.timeout ??= durationFromMs(Math.ceil(timeoutMs));
  return query;
}

/** A query that gets one answer. */
class PendingQuery {
  readonly isUnanswered = true;
  readonly answer: Promise<Answer>;

  private resolve!: (answer: Answer) => void;
  private reject!: (error: Error) => void;
  private parts: Recollections[] = [];

  constructor(readonly query: RecallQuery) {
    this.answer = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.answer.catch(() => undefined); // the caller of `query` handles the rejection
  }

  /** Prepares for resending on a new connection. */
  prepareResend(): void {
    this.parts = [];
  }

  /** Adds a part of the answer. */
  addPart(part: Recollections): void {
    this.parts.push(part);
  }

  /** Completes the answer. */
  completeAnswer(done: RecallDone): void {
    this.resolve(toAnswer(this.parts, done));
  }

  /** Fails the query. */
  failQuery(error: Error): void {
    this.reject(error);
  }
}

/** The context of a turn that waits for its answer. */
class PendingContext {
  readonly isUnanswered = true;
  readonly query: ContextQuery;
  readonly answer: Promise<ContextResponse>;

  private resolve!: (answer: ContextResponse) => void;
  private reject!: (error: Error) => void;

  constructor(request: ContextRequest) {
    this.query = create(ContextQuerySchema, { request });
    this.answer = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.answer.catch(() => undefined); // the caller of `context` handles the rejection
  }

  /** It has no parts. */
  prepareResend(): void {}

  /** Completes the answer. */
  complete(answer: ContextResponse | undefined): void {
    if (answer) this.resolve(answer);
    else this.reject(protocolViolationError("the server's context is empty"));
  }

  /** Fails the query. */
  failQuery(error: Error): void {
    this.reject(error);
  }
}

type OpenQuery = PendingQuery | StandingState | PendingContext;

/** Returns the message that sends a query. */
function requestOf(question: OpenQuery): NonNullable<MessageInitShape<typeof RecallRequestSchema>["message"]> {
  return question instanceof PendingContext
    ? { case: "context", value: question.query }
    : { case: "query", value: question.query };
}

/** A stream of queries to one memory, created by `Memory.recall`. Queries over the server's limit in flight are queued. */
export class RecallStream {
  /** Number of connections opened so far. */
  connections = 0;

  private readonly changes = new Changes();
  private readonly endController = new AbortController();
  /** Aborted when the stream ends, with the reason. */
  private readonly endSignal: AbortSignal;
  private readonly ended: Promise<void>;
  /** Queries that have not ended, by id. */
  private readonly openQueries = new Map<string, OpenQuery>();
  /** Queries of an earlier connection that exceed this server's limit in flight, to be resent. */
  private toResend: OpenQuery[] = [];
  private outbox: RecallRequest[] = [];
  private ids = 0;
  private inFlightMax = IN_FLIGHT_MAX;
  private error: Error | undefined;
  private connected = false;
  private draining = false;
  private closing = false;

  /** Use `Memory.recall`. */
  constructor(
    private readonly link: Link,
    private readonly memory: MemoryPath,
    private readonly options: RecallOptions,
  ) {
    const { signal } = options;
    this.endSignal = AbortSignal.any([this.endController.signal, link.closed, ...(signal ? [signal] : [])]);
    this.ended = this.runConnections();
  }

  /** Resolves when the server has answered. */
  async waitUntilOpen(): Promise<void> {
    await this.waitUntil(() => this.connections > 0, this.options.signal);
  }

  /**
   * Sends a query and waits for the answer. An aborted signal or the end of the timeout cancels only this query. The query
   * carries the timeout, so that the server stops working on it then; a timeout that the query already has is kept.
   */
  async query(what: Query, options: QueryOptions = {}): Promise<Answer> {
    checkOptions("options", options, QUERY_OPTIONS);
    const { signal, timeoutMs = this.link.timeoutMs } = options;
    const question = new PendingQuery(withTimeout(what, timeoutMs));
    return this.waitForAnswer(question, question.answer, timeoutMs, signal);
  }

  /**
   * Builds the context of a turn, as `Client.context`, from the memory of this stream. An aborted signal or the end of the
   * timeout cancels only this turn.
   */
  async context(question: string, options: ContextOptions = {}): Promise<Context> {
    checkOptions("options", options, CONTEXT_OPTIONS);
    const { signal, timeoutMs = this.link.timeoutMs, ...asked } = options;
    const request = toContextRequest(question, asked);
    const memory = `${this.memory.namespace}/${this.memory.name}`;
    request.scopes = [create(RecallScopeSchema, { memories: { case: "memory", value: memory } })];
    const pending = new PendingContext(request);
    return new Context(this.link, request, await this.waitForAnswer(pending, pending.answer, timeoutMs, signal));
  }

  /** Sends a query, and waits for its answer until the signal or the timeout. */
  private async waitForAnswer<T>(
    question: OpenQuery, answer: Promise<T>, timeoutMs: number, signal: AbortSignal | undefined,
  ): Promise<T> {
    const limit = new AbortController();
    const stop = (): void => { limit.abort(signal?.reason); };
    const timer = setTimeout(() => { limit.abort(deadlineError(timeoutMs)); }, Math.min(timeoutMs, TIMEOUT_MAX_MS));
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      await this.sendWhenRoom(question, limit.signal);
      return await raceSignal(answer, limit.signal);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", stop);
      this.cancelQuery(question);
    }
  }

  /**
   * Returns a standing query: its answer is kept current as the memory changes. Iterating over it sends the query. The
   * answer has no working memory, and the query does not reinforce fragments. It counts as one query in flight until it
   * is closed.
   */
  subscribe(what: Query, options: StandingOptions = {}): StandingQuery {
    checkOptions("options", options, QUERY_OPTIONS);
    const timeoutMs = options.timeoutMs ?? this.link.timeoutMs;
    const standing = new StandingState(withTimeout(what, timeoutMs));
    standing.query.subscribe = true;
    return new StandingQuery(
      standing,
      { ...options, timeoutMs },
      (signal) => this.sendWhenRoom(standing, signal),
      () => { this.cancelQuery(standing); },
    );
  }

  /** Waits until the queries in flight are answered, then ends the stream and its standing queries. */
  async close({ signal }: WaitOptions = {}): Promise<void> {
    this.closing = true;
    this.changes.notify();
    try {
      await this.waitUntil(() => !this.hasUnanswered(), signal);
      if (this.connected && !this.draining) {
        this.pushRequest({ case: "close", value: {} });
        await this.waitUntil(() => !this.connected, signal);
      }
    } finally {
      await this.abandon();
    }
  }

  /** Ends the stream and cancels its queries. */
  async abandon(): Promise<void> {
    this.endController.abort(new ClosedError());
    await this.ended;
  }

  /** `await using` abandons a stream that was not closed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.abandon();
  }

  /** Sends a query when there is room. */
  private async sendWhenRoom(question: OpenQuery, signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    this.link.noteCaller(question.query);
    // Sent inside of the condition: of several waiters, another may run between the wake-up and the next statement.
    await this.waitUntil(() => {
      if (this.error) throw this.error;
      if (this.closing) throw new ClosedError();
      if (this.openQueries.size >= this.inFlightMax) return false;
      question.query.queryId = String(++this.ids);
      this.openQueries.set(question.query.queryId, question);
      this.pushRequest(requestOf(question));
      return true;
    }, signal);
  }

  /** Whether a query waits for its first answer. */
  private hasUnanswered(): boolean {
    return [...this.openQueries.values()].some((question) => question.isUnanswered);
  }

  /** Cancels a query that has not ended, also on the server. */
  private cancelQuery(question: OpenQuery): void {
    const { queryId } = question.query;
    if (this.openQueries.get(queryId) !== question) return;
    this.openQueries.delete(queryId);
    if (this.toResend.includes(question)) this.toResend = this.toResend.filter((one) => one !== question);
    else this.pushRequest({ case: "cancel", value: { queryId } });
    this.notify();
  }

  /** Wakes all waiters, and resends queries while there is room. */
  private notify(): void {
    this.changes.notify();
    while (this.openQueries.size - this.toResend.length < this.inFlightMax) {
      const next = this.toResend.shift();
      if (next === undefined) break;
      this.pushRequest(requestOf(next));
    }
  }

  /** Queues a request, except while draining: the next connection resends the open queries. */
  private pushRequest(message: NonNullable<MessageInitShape<typeof RecallRequestSchema>["message"]>): void {
    if (this.connected && !this.draining) this.outbox.push(create(RecallRequestSchema, { message }));
    this.changes.notify();
  }

  private async waitUntil(ready: () => boolean, signal?: AbortSignal): Promise<void> {
    while (!ready()) {
      if (this.error) throw this.error;
      await this.changes.next(signal);
    }
  }

  private async runConnections(): Promise<void> {
    const backoff = new Backoff(this.link.retry);
    let error: Error = new ClosedError();
    try {
      await repeatUntilDone(() => this.runConnection(backoff), backoff, this.endSignal);
    } catch (thrown) {
      error = this.endSignal.aborted ? (this.endSignal.reason as Error) : asError(thrown);
    }
    this.error = error;
    for (const question of this.openQueries.values()) question.failQuery(error);
    this.openQueries.clear();
    this.toResend = [];
    this.notify();
  }

  private async runConnection(backoff: Backoff): Promise<void> {
    const disconnect = new AbortController();
    const signal = AbortSignal.any([disconnect.signal, this.endSignal]);
    let isOpen = false;
    try {
      const headers = this.link.route(this.memory);
      for await (const response of this.link.streams.recall(this.requests(signal), { signal, headers })) {
        if (!isOpen) {
          this.handleOpened(response);
          backoff.markOpened();
          isOpen = true;
        } else if (this.handleResponse(response, disconnect)) {
          backoff.markProgress();
        }
      }
      if (!this.closing || this.hasUnanswered()) throw unavailableError("the server ended the stream");
    } finally {
      disconnect.abort();
      this.connected = false;
      this.notify();
    }
  }

  private handleOpened(response: RecallResponse): void {
    const answer = response.message;
    if (answer.case === "goingAway") throw shuttingDownError(answer.value);
    if (answer.case !== "opened") throw notOpenedError(answer.case);
    this.link.connections.allowCalls(answer.value.limits?.connectionStreamsMax ?? 0);
    const most = answer.value.limits?.queriesInFlightMax ?? 0;
    this.inFlightMax = most || IN_FLIGHT_MAX;
    this.connected = true;
    this.draining = false;
    this.outbox = [];
    for (const question of this.openQueries.values()) question.prepareResend();
    this.toResend = [...this.openQueries.values()];
    this.connections += 1;
    this.notify();
  }

  /** Handles one response and returns whether it answered a query. Throws SHUTTING_DOWN when it is time to reconnect. */
  private handleResponse({ message }: RecallResponse, disconnect: AbortController): boolean {
    let answered = false;
    if (message.case === "recollections") {
      const question = this.openQueries.get(message.value.queryId);
      if (!(question instanceof PendingContext)) question?.addPart(message.value);
      answered = this.completeQuery(message.value.done);
    } else if (message.case === "done") { // from an older server
      answered = this.completeQuery(message.value);
    } else if (message.case === "context") {
      answered = true;
      this.completeContext(message.value);
    } else if (message.case === "failed") {
      answered = true;
      this.failQuery(message.value.queryId, fromStatus(message.value.status));
    } else if (message.case === "goingAway") {
      // Queries are safe to repeat: those not answered during the grace period go to the next server.
      this.draining = true;
      setTimeout(() => { disconnect.abort(); }, Math.min(durationMs(message.value.grace), drains.graceMaxMs)).unref();
    }
    if (this.draining && !this.hasUnanswered()) throw shuttingDownError();
    return answered;
  }

  /** Completes the answer of a query; returns whether `done` is set. */
  private completeQuery(done: RecallDone | undefined): boolean {
    if (!done) return false;
    const question = this.openQueries.get(done.queryId);
    if (question instanceof PendingContext) return true;
    if (!(question instanceof StandingState)) this.openQueries.delete(done.queryId);
    question?.completeAnswer(done);
    this.notify();
    return true;
  }

  private completeContext({ queryId, response }: ContextAnswer): void {
    const question = this.openQueries.get(queryId);
    if (!(question instanceof PendingContext)) return;
    this.openQueries.delete(queryId);
    question.complete(response);
    this.notify();
  }

  /** Ends a query that failed. A standing query that had an answer is resent after a transient error. */
  private failQuery(queryId: string, error: MemstreamError): void {
    const question = this.openQueries.get(queryId);
    if (question instanceof StandingState && !question.isUnanswered && isCut(error)) {
      const connection = this.connections;
      setTimeout(() => { this.resendStanding(question, connection); }, error.retryAfterMs ?? RESEND_DELAY_MS).unref();
      return;
    }
    this.openQueries.delete(queryId);
    question?.failQuery(error);
    this.notify();
  }

  /** Resends a standing query, unless a new connection has done so. */
  private resendStanding(standing: StandingState, connection: number): void {
    const isOpen = this.openQueries.get(standing.query.queryId) === standing;
    if (!isOpen || !this.connected || this.connections !== connection) return;
    standing.prepareResend();
    this.pushRequest({ case: "query", value: standing.query });
  }

  private async *requests(signal: AbortSignal): AsyncGenerator<RecallRequest> {
    const { namespace, name } = this.memory;
    const value = { namespace, memory: name, session: this.options.session ?? "", doneInRecollections: true };
    yield create(RecallRequestSchema, { message: { case: "open", value } });
    while (!signal.aborted) {
      const next = this.connected ? this.outbox.shift() : undefined;
      if (next) yield next;
      if (next?.message.case === "close") return; // nothing may follow
      if (!next) await this.changes.next(signal).catch(() => undefined); // the loop condition sees the abort
    }
  }
}
