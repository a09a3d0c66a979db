/// <reference lib="esnext.disposable" preserve="true" />
/** The Recall stream: many queries in flight, each answered, given up and asked again on its own. */
import { clone, create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs } from "@bufbuild/protobuf/wkt";

import { Backoff, persist } from "./backoff.js";
import { Changes, raceSignal } from "./changes.js";
import { asError, ClosedError, fromStatus, isCut, late, notOpened, shuttingDown, unavailable } from "./errors.js";
import type { MemstreamError } from "./errors.js";
import type { Fragment } from "./gen/memstream/v1/fragment_pb.js";
import { RecallQuerySchema, RecallRequestSchema } from "./gen/memstream/v1/stream_service_pb.js";
import type {
  RecallDone,
  Recollection,
  Recollections,
  RecallQuery,
  RecallRequest,
  RecallResponse,
} from "./gen/memstream/v1/stream_service_pb.js";
import type { Link, MemoryPath } from "./link.js";
import { durationMs } from "./link.js";
import type { WaitOptions } from "./observe.js";
import { Standing, StandingQuery } from "./standing.js";
import type { StandingOptions } from "./standing.js";

/** Queries in flight where the server does not say how many it takes. */
const IN_FLIGHT_MAX = 64;
const GRACE_MAX_MS = 1_000;
/** The longest time that a timer takes. */
const TIMEOUT_MAX_MS = 2 ** 31 - 1;
/** After what will pass has ended a standing query, where the server does not say how long that takes. */
const AGAIN_MS = 1_000;

/** A question: text, or a query as the contract has it. */
export type Query = string | MessageInitShape<typeof RecallQuerySchema>;

/** What bounds a query. */
export interface QueryOptions extends WaitOptions {
  /** Bounds the wait for the answer, which then rejects with DEADLINE_EXCEEDED. Default: the client's. */
  readonly timeoutMs?: number | undefined;
}

/** What may be said of a Recall stream. */
export interface RecallOptions {
  /** On whose behalf is asked. */
  readonly session?: string;
  /** Ends the stream: its opening, and later whatever waits for it, rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** The whole answer to a query. */
export interface Answer {
  /** Ranked, best first. */
  readonly recollections: readonly Recollection[];
  /** The short-term fragments in order, those that were also ranked included. */
  readonly workingMemory: readonly Fragment[];
  /** Which revision was read, what was considered, and how long it took. */
  readonly done: RecallDone;
}

/** The query of a question. */
export function toQuery(what: Query): RecallQuery {
  return create(
    RecallQuerySchema,
    typeof what === "string" ? { observation: { case: "text", value: what } } : what,
  );
}

/** The query of a question, which the server gives up as well when the time is over. */
function timed(what: Query, timeoutMs: number): RecallQuery {
  const query = clone(RecallQuerySchema, toQuery(what));
  if (timeoutMs > 0 && timeoutMs <= TIMEOUT_MAX_MS) query.timeout ??= durationFromMs(Math.ceil(timeoutMs));
  return query;
}

/** The answer of its parts. */
export function toAnswer(parts: readonly Recollections[], done: RecallDone): Answer {
  const recollections = parts.flatMap((part) => part.recollections);
  const byId = new Map<string, Fragment>();
  for (const { fragment } of recollections) if (fragment) byId.set(fragment.id, fragment);
  for (const fragment of parts.flatMap((part) => part.workingMemory)) byId.set(fragment.id, fragment);
  const workingMemory = parts
    .flatMap((part) => part.workingMemoryIds)
    .map((id) => byId.get(id))
    .filter((fragment) => fragment !== undefined);
  return { recollections, workingMemory, done };
}

/** A query that is answered once. */
class Question {
  readonly waiting = true;
  readonly answer: Promise<Answer>;

  private resolve!: (answer: Answer) => void;
  private reject!: (error: Error) => void;
  private parts: Recollections[] = [];

  constructor(readonly query: RecallQuery) {
    this.answer = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.answer.catch(() => undefined); // whoever waits for it is told
  }

  /** It is asked on a new connection. */
  again(): void {
    this.parts = [];
  }

  /** A part of the answer. */
  continued(part: Recollections): void {
    this.parts.push(part);
  }

  /** The answer is complete. */
  answered(done: RecallDone): void {
    this.resolve(toAnswer(this.parts, done));
  }

  /** There is no answer. */
  failed(error: Error): void {
    this.reject(error);
  }
}

/** A stream of queries to one memory; made by `Memory.recall`. Beyond what the server takes, queries wait their turn. */
export class RecallStream {
  /** How many connections were opened. */
  connections = 0;

  private readonly changes = new Changes();
  private readonly end = new AbortController();
  /** Aborted when the stream is over, with why. */
  private readonly life: AbortSignal;
  private readonly over: Promise<void>;
  /** Those that are not over, by id. */
  private readonly asked = new Map<string, Question | Standing>();
  /** Those of an earlier connection that this one's server has no room for yet. */
  private again: (Question | Standing)[] = [];
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
    this.life = AbortSignal.any([this.end.signal, link.closed, ...(signal ? [signal] : [])]);
    this.over = this.run();
  }

  /** Resolves once the server has answered. */
  async opened(): Promise<void> {
    await this.until(() => this.connections > 0, this.options.signal);
  }

  /**
   * Asks; aborting the signal, or the end of the time, gives up this query alone. The server is told the time limit, and
   * stops working on the query then; a timeout of the query's own stays as it is.
   */
  async query(what: Query, { signal, timeoutMs = this.link.timeoutMs }: QueryOptions = {}): Promise<Answer> {
    const question = new Question(timed(what, timeoutMs));
    const limit = new AbortController();
    const stop = (): void => { limit.abort(signal?.reason); };
    const timer = setTimeout(() => { limit.abort(late(timeoutMs)); }, Math.min(timeoutMs, TIMEOUT_MAX_MS));
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      await this.put(question, limit.signal);
      return await raceSignal(question.answer, limit.signal);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", stop);
      this.giveUp(question);
    }
  }

  /**
   * A query that goes on being answered as the memory changes; iterating over it asks. Working memory is left out,
   * nothing is reinforced. It takes one of the places of queries in flight until it is closed.
   */
  subscribe(what: Query, options: StandingOptions = {}): StandingQuery {
    const timeoutMs = options.timeoutMs ?? this.link.timeoutMs;
    const standing = new Standing(timed(what, timeoutMs));
    standing.query.subscribe = true;
    return new StandingQuery(
      standing,
      { ...options, timeoutMs },
      (signal) => this.put(standing, signal),
      () => { this.giveUp(standing); },
    );
  }

  /** Waits until the queries in flight are answered, and ends the stream, and with it standing queries. */
  async close({ signal }: WaitOptions = {}): Promise<void> {
    this.closing = true;
    this.changes.notify();
    try {
      await this.until(() => !this.waiting(), signal);
      if (this.connected && !this.draining) {
        this.push({ case: "close", value: {} });
        await this.until(() => !this.connected, signal);
      }
    } finally {
      await this.abandon();
    }
  }

  /** Ends the stream and gives up what was asked. */
  async abandon(): Promise<void> {
    this.end.abort(new ClosedError());
    await this.over;
  }

  /** `await using` abandons what was not closed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.abandon();
  }

  /** Asks it once there is room. */
  private async put(question: Question | Standing, signal: AbortSignal): Promise<void> {
    signal.throwIfAborted();
    // Asked where the room is seen: of many who wait for it, others look before this one goes on.
    await this.until(() => {
      if (this.error) throw this.error;
      if (this.closing) throw new ClosedError();
      if (this.asked.size >= this.inFlightMax) return false;
      question.query.queryId = String(++this.ids);
      this.asked.set(question.query.queryId, question);
      this.push({ case: "query", value: question.query });
      return true;
    }, signal);
  }

  /** Whether somebody waits for an answer. */
  private waiting(): boolean {
    return [...this.asked.values()].some((question) => question.waiting);
  }

  private giveUp(question: Question | Standing): void {
    const { queryId } = question.query;
    if (this.asked.get(queryId) !== question) return;
    this.asked.delete(queryId);
    if (this.again.includes(question)) this.again = this.again.filter((one) => one !== question);
    else this.push({ case: "cancel", value: { queryId } });
    this.notify();
  }

  /** Wakes whoever waits, and asks again what there is room for. */
  private notify(): void {
    this.changes.notify();
    while (this.asked.size - this.again.length < this.inFlightMax) {
      const next = this.again.shift();
      if (next === undefined) break;
      this.push({ case: "query", value: next.query });
    }
  }

  /** For the writer; while draining nothing: the next connection asks for what is then still wanted. */
  private push(message: NonNullable<MessageInitShape<typeof RecallRequestSchema>["message"]>): void {
    if (this.connected && !this.draining) this.outbox.push(create(RecallRequestSchema, { message }));
    this.changes.notify();
  }

  private async until(ready: () => boolean, signal?: AbortSignal): Promise<void> {
    while (!ready()) {
      if (this.error) throw this.error;
      await this.changes.next(signal);
    }
  }

  private async run(): Promise<void> {
    const backoff = new Backoff(this.link.retry);
    let error: Error = new ClosedError();
    try {
      await persist(() => this.connection(backoff), backoff, this.life);
    } catch (thrown) {
      error = this.life.aborted ? (this.life.reason as Error) : asError(thrown);
    }
    this.error = error;
    for (const question of this.asked.values()) question.failed(error);
    this.asked.clear();
    this.again = [];
    this.notify();
  }

  private async connection(backoff: Backoff): Promise<void> {
    const hangUp = new AbortController();
    const signal = AbortSignal.any([hangUp.signal, this.life]);
    let isOpen = false;
    try {
      const headers = this.link.route(this.memory);
      for await (const response of this.link.streams.recall(this.requests(signal), { signal, headers })) {
        if (!isOpen) {
          this.open(response);
          backoff.opened();
          isOpen = true;
        } else if (this.take(response, hangUp)) {
          backoff.progressed();
        }
      }
      if (!this.closing || this.waiting()) throw unavailable("the server ended the stream");
    } finally {
      hangUp.abort();
      this.connected = false;
      this.notify();
    }
  }

  private open(response: RecallResponse): void {
    const answer = response.message;
    if (answer.case === "goingAway") throw shuttingDown(answer.value);
    if (answer.case !== "opened") throw notOpened(answer.case);
    const most = answer.value.limits?.queriesInFlightMax ?? 0;
    this.inFlightMax = most || IN_FLIGHT_MAX;
    this.connected = true;
    this.draining = false;
    this.outbox = [];
    for (const question of this.asked.values()) question.again();
    this.again = [...this.asked.values()];
    this.connections += 1;
    this.notify();
  }

  /** Takes one message; whether it answered a query. Throws SHUTTING_DOWN when it is time to reconnect. */
  private take({ message }: RecallResponse, hangUp: AbortController): boolean {
    let answered = false;
    if (message.case === "recollections") {
      this.asked.get(message.value.queryId)?.continued(message.value);
      answered = this.completed(message.value.done);
    } else if (message.case === "done") { // of an older server
      answered = this.completed(message.value);
    } else if (message.case === "failed") {
      answered = true;
      this.refused(message.value.queryId, fromStatus(message.value.status));
    } else if (message.case === "goingAway") {
      // Queries are only questions: what is not answered within the grace is asked of the next server.
      this.draining = true;
      setTimeout(() => { hangUp.abort(); }, Math.min(durationMs(message.value.grace), GRACE_MAX_MS)).unref();
    }
    if (this.draining && !this.waiting()) throw shuttingDown();
    return answered;
  }

  /** Answers the query of which this is the end; whether there is one. */
  private completed(done: RecallDone | undefined): boolean {
    if (!done) return false;
    const question = this.asked.get(done.queryId);
    if (!(question instanceof Standing)) this.asked.delete(done.queryId);
    question?.answered(done);
    this.notify();
    return true;
  }

  private refused(queryId: string, error: MemstreamError): void {
    const question = this.asked.get(queryId);
    if (question instanceof Standing && !question.waiting && isCut(error)) {
      const connection = this.connections;
      setTimeout(() => { this.askAgain(question, connection); }, error.retryAfterMs ?? AGAIN_MS).unref();
      return;
    }
    this.asked.delete(queryId);
    question?.failed(error);
    this.notify();
  }

  /** Unless a new connection has asked it by now. */
  private askAgain(standing: Standing, connection: number): void {
    const stands = this.asked.get(standing.query.queryId) === standing;
    if (!stands || !this.connected || this.connections !== connection) return;
    standing.again();
    this.push({ case: "query", value: standing.query });
  }

  private async *requests(signal: AbortSignal): AsyncGenerator<RecallRequest> {
    const { namespace, name } = this.memory;
    const value = { namespace, memory: name, session: this.options.session ?? "", doneInRecollections: true };
    yield create(RecallRequestSchema, { message: { case: "open", value } });
    while (!signal.aborted) {
      const next = this.connected ? this.outbox.shift() : undefined;
      if (next) yield next;
      if (next?.message.case === "close") return; // nothing may follow
      if (!next) await this.changes.next(signal).catch(() => undefined); // its end is seen above
    }
  }
}
