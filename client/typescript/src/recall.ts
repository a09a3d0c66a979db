/** The Recall stream: many queries in flight, each answered, given up and asked again on its own. */
import { clone, create } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";

import { Backoff, persist } from "./backoff.js";
import { aborted, Changes } from "./changes.js";
import { asError, ClosedError, fromStatus, protocolViolation, shuttingDown, unavailable } from "./errors.js";
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

/** Queries in flight where the server does not say how many it takes. */
const IN_FLIGHT_MAX = 64;
const GRACE_MAX_MS = 1_000;

/** A question: text, or a query as the contract has it. */
export type Query = string | MessageInitShape<typeof RecallQuerySchema>;

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

interface Question {
  readonly query: RecallQuery;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: MemstreamError) => void;
  parts: Recollections[];
}

/** A stream of queries to one memory; made by `Memory.recall`. Beyond what the server takes, queries wait their turn. */
export class RecallStream {
  /** How many connections were opened. */
  connections = 0;

  private readonly changes = new Changes();
  private readonly end = new AbortController();
  private readonly over: Promise<void>;
  private readonly asked = new Map<string, Question>();
  /** Those of an earlier connection that this one's server has no room for yet. */
  private again: Question[] = [];
  private outbox: RecallRequest[] = [];
  private ids = 0;
  private inFlightMax = IN_FLIGHT_MAX;
  private error: MemstreamError | undefined;
  private connected = false;
  private draining = false;
  private closing = false;

  /** Use `Memory.recall`. */
  constructor(
    private readonly link: Link,
    private readonly memory: MemoryPath,
    private readonly session: string,
  ) {
    this.over = this.run();
  }

  /** Resolves once the server has answered. */
  async opened(): Promise<this> {
    await this.until(() => this.connections > 0);
    return this;
  }

  /** Asks; aborting the signal gives up this query alone. Without a signal the client's timeout bounds it. */
  async query(what: Query, signal: AbortSignal = AbortSignal.timeout(this.link.timeoutMs)): Promise<Answer> {
    const query = clone(RecallQuerySchema, toQuery(what));
    let resolve!: (answer: Answer) => void;
    let reject!: (error: MemstreamError) => void;
    const promise = new Promise<Answer>((resolved, rejected) => {
      resolve = resolved;
      reject = rejected;
    });
    promise.catch(() => undefined); // whoever waits for it is told below
    // Asked where the room is seen: of many who wait for it, others look before this one goes on.
    await this.until(() => {
      if (this.error) throw this.error;
      if (this.closing) throw new ClosedError();
      if (this.asked.size >= this.inFlightMax) return false;
      query.queryId = String(++this.ids);
      this.asked.set(query.queryId, { query, resolve, reject, parts: [] });
      this.push({ case: "query", value: query });
      return true;
    }, signal);
    const stop = (): void => {
      this.giveUp(query.queryId);
      reject(aborted(signal));
    };
    if (signal.aborted) stop();
    signal.addEventListener("abort", stop, { once: true });
    return promise.finally(() => { signal.removeEventListener("abort", stop); });
  }

  /** Waits until the queries in flight are answered, and ends the stream. */
  async close(signal?: AbortSignal): Promise<void> {
    this.closing = true;
    this.changes.notify();
    try {
      await this.until(() => this.asked.size === 0, signal);
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

  private giveUp(queryId: string): void {
    const question = this.asked.get(queryId);
    if (question === undefined) return;
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
    let error: MemstreamError = new ClosedError();
    try {
      await persist(() => this.connection(backoff), backoff, this.end.signal);
    } catch (thrown) {
      if (!this.end.signal.aborted) error = asError(thrown);
    }
    this.error = error;
    for (const question of this.asked.values()) question.reject(error);
    this.asked.clear();
    this.again = [];
    this.notify();
  }

  private async connection(backoff: Backoff): Promise<void> {
    const hangUp = new AbortController();
    const signal = AbortSignal.any([hangUp.signal, this.end.signal]);
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
      if (!this.closing || this.asked.size > 0) throw unavailable("the server ended the stream");
    } finally {
      hangUp.abort();
      this.connected = false;
      this.notify();
    }
  }

  private open(response: RecallResponse): void {
    const answer = response.message;
    if (answer.case === "goingAway") throw shuttingDown(answer.value);
    if (answer.case !== "opened") throw protocolViolation(answer.case);
    const most = answer.value.limits?.queriesInFlightMax ?? 0;
    this.inFlightMax = most || IN_FLIGHT_MAX;
    this.connected = true;
    this.draining = false;
    this.outbox = [];
    for (const question of this.asked.values()) question.parts = [];
    this.again = [...this.asked.values()];
    this.connections += 1;
    this.notify();
  }

  /** Takes one message; whether it answered a query. Throws SHUTTING_DOWN when it is time to reconnect. */
  private take({ message }: RecallResponse, hangUp: AbortController): boolean {
    let answered = false;
    if (message.case === "recollections") {
      this.asked.get(message.value.queryId)?.parts.push(message.value);
      answered = this.completed(message.value.done);
    } else if (message.case === "done") { // of an older server
      answered = this.completed(message.value);
    } else if (message.case === "failed") {
      answered = true;
      this.settled(message.value.queryId)?.reject(fromStatus(message.value.status));
    } else if (message.case === "goingAway") {
      // Queries are only questions: what is not answered within the grace is asked of the next server.
      this.draining = true;
      setTimeout(() => { hangUp.abort(); }, Math.min(durationMs(message.value.grace), GRACE_MAX_MS)).unref();
    }
    if (this.draining && this.asked.size === 0) throw shuttingDown();
    return answered;
  }

  /** Answers the query of which this is the end; whether there is one. */
  private completed(done: RecallDone | undefined): boolean {
    if (!done) return false;
    const question = this.settled(done.queryId);
    question?.resolve(toAnswer(question.parts, done));
    return true;
  }

  private settled(queryId: string): Question | undefined {
    const question = this.asked.get(queryId);
    this.asked.delete(queryId);
    this.notify();
    return question;
  }

  private async *requests(signal: AbortSignal): AsyncGenerator<RecallRequest> {
    const { namespace, name } = this.memory;
    const value = { namespace, memory: name, session: this.session, doneInRecollections: true };
    yield create(RecallRequestSchema, { message: { case: "open", value } });
    while (!signal.aborted) {
      const next = this.connected ? this.outbox.shift() : undefined;
      if (next) yield next;
      else await this.changes.next(signal).catch(() => undefined); // its end is seen above
    }
  }
}
