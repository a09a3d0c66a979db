/// <reference lib="esnext.disposable" preserve="true" />
/**
 * The Observe stream: numbered observations, delivered once over any number of connections.
 *
 * Rule 1: one loop owns the call, reads it and opens the next one; what is sent is taken from the ledger, never from a
 * queue that a dead connection could have emptied.
 * Rule 2: only `close` tells the server that the producer has finished; what was not received of an abandoned stream is
 * not there.
 */
import { setTimeout as sleep } from "node:timers/promises";

import { create, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";

import { Backoff, persist } from "./backoff.js";
import { Changes } from "./changes.js";
import { asError, ClosedError, invalid, notOpened, protocolViolation, shuttingDown, unavailable } from "./errors.js";
import type { Observation } from "./gen/memstream/v1/fragment_pb.js";
import { ObservationSchema } from "./gen/memstream/v1/fragment_pb.js";
import { AckLevel, ObserveRequestSchema } from "./gen/memstream/v1/stream_service_pb.js";
import type {
  ObservationOutcome,
  ObserveOpened,
  ObserveRequest,
  ObserveResponse,
  RejectedObservation,
} from "./gen/memstream/v1/stream_service_pb.js";
import { Ledger } from "./ledger.js";
import type { Resumption } from "./ledger.js";
import type { Link, MemoryPath } from "./link.js";
import { durationMs } from "./link.js";
import type { Sent } from "./sent.js";

const GRACE_MAX_MS = 30_000;

/** What may be said of an Observe stream. */
export interface ObserveOptions {
  /** Session of observations that give none. */
  readonly session?: string;
  /** What `flush` waits for. Default STORED. */
  readonly ackLevel?: AckLevel;
  /** Have the server say what became of each observation. */
  readonly outcomes?: boolean;
  /**
   * For a process that goes on where an earlier one of the producer ended: the last number up to which that one had every
   * refusal and, with `outcomes`, every outcome; 0n for none. The server sends those of later numbers again, which
   * `resumption` has.
   */
  readonly knownSequence?: bigint | undefined;
  /** Ends the stream: its opening, and later whatever waits for it, rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** What bounds one wait. */
export interface WaitOptions {
  /** Ends this wait alone, which rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** What was perceived: text, or an observation as the contract has it. */
export type Observable = string | MessageInitShape<typeof ObservationSchema>;

/** The answer to `open`, with all refusals and outcomes that follow it. */
interface Opening {
  readonly opened: ObserveOpened;
  readonly rejected: RejectedObservation[];
  readonly outcomes: ObservationOutcome[];
  resumed: bigint;
}

/** A connection's own state; the next one begins anew. */
class Connection {
  readonly abort = new AbortController();
  /** What the server was told that is known here. */
  known: bigint | undefined;
  /** What the server sends again, until it is whole. */
  opening: Opening | undefined;
  repeatsFlush = 0n;
  closeSent = false;
  draining = false;
  isOpen = false;
}

/** A producer's stream into one memory; made by `Memory.observe`. */
export class ObserveStream {
  /** How many connections were opened. */
  connections = 0;

  private readonly ledger: Ledger;
  private readonly changes = new Changes();
  private readonly end = new AbortController();
  /** Aborted when the stream is over, with why. */
  private readonly life: AbortSignal;
  private readonly over: Promise<void>;
  private turn: Promise<void> = Promise.resolve();
  private waitingTurns = 0;
  private error: Error | undefined;
  private closing = false;
  private closed = false;
  private flushIds = 0n;
  private pauseUntil = 0;

  /** Use `Memory.observe`. */
  constructor(
    private readonly link: Link,
    private readonly memory: MemoryPath,
    readonly producer: string,
    private readonly options: ObserveOptions,
  ) {
    this.ledger = new Ledger(options.knownSequence);
    this.life = AbortSignal.any([this.end.signal, link.closed, ...(options.signal ? [options.signal] : [])]);
    this.over = this.run();
  }

  /** Resolves once the server has answered. */
  async opened(): Promise<void> {
    await this.until(() => this.connections > 0, this.options.signal);
  }

  /** The number the next observation gets; after a restart, where to resume one's own source. */
  get expectedSequence(): bigint {
    return this.ledger.last + 1n;
  }

  /** Everything up to this number is durable, or was refused. */
  get received(): bigint {
    return this.ledger.received;
  }

  /** Everything up to this number is seen by every recall, or was refused. */
  get stored(): bigint {
    return this.ledger.stored;
  }

  /** Everything up to this number is in the vector index, or needs none. */
  get indexed(): bigint {
    return this.ledger.indexed;
  }

  /** The memory's revision that made `stored` true: give it to a recall as `minRevision`. */
  get revision(): bigint {
    return this.ledger.revision;
  }

  /** What became of the producer's earlier numbers; undefined unless `knownSequence` was given. */
  get resumption(): Resumption | undefined {
    return this.ledger.resumption;
  }

  /** The latest 1,000 observations that were refused, and why. */
  get rejected(): readonly RejectedObservation[] {
    return this.ledger.rejected;
  }

  /** How many were refused. */
  get rejectedCount(): number {
    return this.ledger.rejectedCount;
  }

  /**
   * Numbers an observation and hands it over; waits only while the window is full. If this rejects, the observation was
   * not taken.
   */
  async send(what: Observable, { signal }: WaitOptions = {}): Promise<Sent> {
    signal?.throwIfAborted();
    const said = typeof what === "string" ? { body: { case: "content" as const, value: what } } : what;
    const observation = create(ObservationSchema, said);
    const size = toBinary(ObservationSchema, observation).length;
    this.checkTakes(size);
    if (this.waitingTurns === 0 && this.ledger.hasRoom(size)) return this.take(observation, size);
    return this.taken(observation, size, signal);
  }

  /** Waits until everything sent so far has come to the stream's level. Refused observations do not reject it. */
  async flush({ signal }: WaitOptions = {}): Promise<void> {
    const target = this.ledger.last;
    const level = this.options.ackLevel ?? AckLevel.STORED;
    if (this.ledger.position(level) >= target) return;
    this.checkUsable();
    // The server says unasked how far it has come: to ask would be a message more each way.
    await this.until(() => this.ledger.position(level) >= target, signal);
  }

  /** Flushes, tells the server that the producer has finished, and resolves when all is stored. */
  async close({ signal }: WaitOptions = {}): Promise<void> {
    if (this.error && !this.closed) throw this.error;
    this.closing = true;
    this.changes.notify();
    try {
      await this.until(() => this.closed, signal);
    } finally {
      await this.abandon();
    }
  }

  /** Ends the stream without a word: what was not received is not there. */
  async abandon(): Promise<void> {
    this.end.abort(new ClosedError());
    await this.over;
  }

  /** `await using` abandons what was not closed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.abandon();
  }

  private take(observation: Observation, size: number): Sent {
    this.checkTakes(size);
    const sent = this.ledger.add(observation, size);
    this.changes.notify();
    return sent;
  }

  /** Waits for room: first come, first numbered. */
  private async taken(observation: Observation, size: number, signal?: AbortSignal): Promise<Sent> {
    let sent: Sent | undefined;
    let leave!: () => void;
    const left = new Promise<void>((resolve) => { leave = resolve; });
    const mine = new Changes();
    void this.turn.then(() => { mine.notify(); });
    this.turn = this.turn.then(() => left); // who gives up lets nobody pass those before
    this.waitingTurns += 1;
    try {
      await mine.next(signal);
      await this.until(() => {
        // Another connection may grant less.
        if (!this.ledger.hasRoom(size) && size <= this.ledger.sizeMax) return false;
        sent = this.take(observation, size);
        return true;
      }, signal);
    } finally {
      this.waitingTurns -= 1;
      leave();
    }
    if (sent === undefined) throw new ClosedError();
    return sent;
  }

  private checkUsable(): void {
    if (this.error) throw this.error;
    if (this.closing) throw new ClosedError();
  }

  private checkTakes(size: number): void {
    this.checkUsable();
    if (size > this.ledger.sizeMax) {
      throw invalid("observation", `has ${size} bytes, the server takes at most ${this.ledger.sizeMax}`);
    }
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
    this.ledger.fail(error);
    this.changes.notify();
  }

  private async connection(backoff: Backoff): Promise<void> {
    const connection = new Connection();
    const signal = AbortSignal.any([connection.abort.signal, this.life]);
    try {
      const headers = this.link.route(this.memory);
      for await (const response of this.link.streams.observe(this.requests(connection, signal), { signal, headers })) {
        if (!connection.isOpen) {
          if (this.open(response, connection)) backoff.opened();
        } else if (this.answered(response, connection)) {
          backoff.progressed();
        }
      }
      if (!this.closed) throw unavailable("the server ended the stream");
    } catch (thrown) {
      if (!this.closed) throw thrown; // else all was said before
    } finally {
      connection.abort.abort();
    }
  }

  /** Takes the answer to `open`, and all that the server sends again after it; whether that is whole. */
  private open({ message }: ObserveResponse, connection: Connection): boolean {
    if (message.case === "goingAway") throw shuttingDown(message.value);
    const known = connection.known;
    let { opening } = connection;
    if (opening === undefined) {
      if (message.case !== "opened") throw notOpened(message.case);
      const { rejected, outcomes, resumed } = message.value;
      opening = connection.opening = { opened: message.value, rejected, outcomes, resumed };
    } else {
      const resumed = message.case === "ack" ? message.value.resumed : 0n;
      if (message.case !== "ack" || resumed <= opening.resumed) {
        throw protocolViolation(`the server sent ${message.case ?? "nothing"} and no more of what it was to send again`);
      }
      opening.rejected.push(...message.value.rejected);
      opening.outcomes.push(...message.value.outcomes);
      opening.resumed = resumed;
    }
    const { opened, rejected, outcomes } = opening;
    if (opening.resumed < opened.resumeTo) return false;
    if (known !== undefined) this.ledger.resumed(opened, rejected, outcomes);
    this.ledger.opened(opened);
    connection.isOpen = true;
    this.connections += 1;
    this.changes.notify();
    return true;
  }

  /** Takes one answer; whether it was progress. Throws SHUTTING_DOWN when it is time to reconnect. */
  private answered({ message }: ObserveResponse, connection: Connection): boolean {
    let progress = false;
    if (message.case === "ack") {
      if (connection.repeatsFlush && message.value.flushed >= connection.repeatsFlush) {
        connection.repeatsFlush = 0n;
        this.ledger.repeatsSettled();
      }
      progress = this.ledger.acknowledged(message.value);
    } else if (message.case === "closed") {
      this.ledger.repeatsSettled(); // nothing more will be said
      this.ledger.acknowledged(message.value);
      this.closed = progress = true;
    } else if (message.case === "throttle") {
      this.pauseUntil = performance.now() + durationMs(message.value.retryDelay);
    } else if (message.case === "goingAway") {
      // What is in flight may still be acknowledged; what is queued goes over the next connection.
      connection.draining = true;
      const grace = Math.min(durationMs(message.value.grace), GRACE_MAX_MS);
      setTimeout(() => { connection.abort.abort(); }, grace).unref();
    }
    this.changes.notify();
    if (connection.draining && !connection.closeSent && this.ledger.allReceived) throw shuttingDown();
    return progress;
  }

  /** What is sent on a connection, until it is over. */
  private async *requests(connection: Connection, signal: AbortSignal): AsyncGenerator<ObserveRequest> {
    const { namespace, name } = this.memory;
    const { session = "", outcomes = false } = this.options;
    let { ackLevel = AckLevel.UNSPECIFIED } = this.options;
    // The level of the flush after repeats, the only one that is sent: that does not wait for the index.
    if (ackLevel === AckLevel.INDEXED) ackLevel = AckLevel.STORED;
    const known = connection.known = this.ledger.knownSequence;
    const resume = known === undefined ? {} : { knownSequence: known };
    yield request({
      case: "open",
      value: { namespace, memory: name, producer: this.producer, session, ackLevel, outcomes, ...resume },
    });
    while (!signal.aborted) {
      const pause = this.pauseUntil - performance.now();
      if (pause > 0) {
        await sleep(pause, undefined, { signal }).catch(() => undefined);
        continue; // a connection that has ended meanwhile takes nothing from the ledger
      }
      const next = connection.isOpen ? this.due(connection) : undefined;
      if (next) yield next;
      else if (connection.closeSent) return;
      else await this.changes.next(signal).catch(() => undefined); // its end is seen above
    }
  }

  private due(connection: Connection): ObserveRequest | undefined {
    if (connection.draining || connection.closeSent) return undefined;
    if (this.ledger.repeatsSent && connection.repeatsFlush === 0n) {
      connection.repeatsFlush = ++this.flushIds;
      return request({ case: "flush", value: { flushId: connection.repeatsFlush } });
    }
    const batch = this.ledger.nextBatch();
    if (batch) return request({ case: "batch", value: batch });
    if (!this.ledger.allSent) return undefined;
    if (!this.closing) return undefined;
    connection.closeSent = true;
    return request({ case: "close", value: {} });
  }
}

function request(message: NonNullable<MessageInitShape<typeof ObserveRequestSchema>["message"]>): ObserveRequest {
  return create(ObserveRequestSchema, { message });
}
