/// <reference lib="esnext.disposable" preserve="true" />
/**
 * The Observe stream: numbered observations, delivered once over any number of connections.
 *
 * Rule 1: one loop owns the connection: it reads the responses and reconnects. Requests are built from the ledger when
 * they are sent, so a broken connection loses none.
 * Rule 2: only `close` tells the server that the producer has finished. If the stream is abandoned, observations that were
 * not received are lost.
 */
import { setTimeout as sleep } from "node:timers/promises";

import { create, toBinary } from "@bufbuild/protobuf";
import type { MessageInitShape } from "@bufbuild/protobuf";

import { Backoff, repeatUntilDone } from "./backoff.js";
import { Changes } from "./changes.js";
import { checkedMessage, checkOptions } from "./checks.js";
import {
  asError,
  ClosedError,
  invalidField,
  notOpenedError,
  protocolViolationError,
  shuttingDownError,
  unavailableError,
} from "./errors.js";
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

/** Limits the time for which a stream drains after the server has announced its shutdown. */
const GRACE_MAX_MS = 30_000;

/** Options of an Observe stream. */
export interface ObserveOptions {
  /** Session of observations that have none. */
  readonly session?: string;
  /** The level that `flush` waits for. Default STORED. */
  readonly ackLevel?: AckLevel;
  /** Requests the outcome of each observation. */
  readonly outcomes?: boolean;
  /** Names up to this many earlier statements near to the observation in each outcome, at most 10; implies `outcomes`. */
  readonly related?: number;
  /**
   * For a process that continues an earlier process of the producer: the last number up to which that process had every
   * rejection and, with `outcomes`, every outcome; 0n if it had none. The server resends those of later numbers, and
   * `resumption` has them. Undefined requests none.
   */
  readonly knownSequence?: bigint | undefined;
  /** Ends the stream: its opening and every later wait on it rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** Options of one wait. */
export interface WaitOptions {
  /** Ends only this wait, which rejects with the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** Options of one query. */
export interface QueryOptions extends WaitOptions {
  /** Limits the wait for the answer, which then rejects with DEADLINE_EXCEEDED. Default: the client's. */
  readonly timeoutMs?: number | undefined;
}

export const QUERY_OPTIONS = { signal: true, timeoutMs: true } as const;

/** The content of an observation: text, or a message of the contract. */
export type Observable = string | MessageInitShape<typeof ObservationSchema>;

/** Returns the observation as a message. */
export function toObservation(what: Observable): Observation {
  const init = typeof what === "string" ? { body: { case: "content" as const, value: what } } : what;
  return checkedMessage("observation", ObservationSchema, init);
}

/** The answer to `open`, with the rejections and outcomes that follow it. */
interface Opening {
  readonly opened: ObserveOpened;
  readonly rejected: RejectedObservation[];
  readonly outcomes: ObservationOutcome[];
  resumed: bigint;
}

/** State of one connection. */
class ConnectionState {
  readonly abort = new AbortController();
  /** The `known_sequence` that was sent. */
  known: bigint | undefined;
  /** The resumption while it is incomplete. */
  opening: Opening | undefined;
  repeatsFlush = 0n;
  closeSent = false;
  draining = false;
  isOpen = false;
}

/** A producer's stream into one memory, created by `Memory.observe`. */
export class ObserveStream {
  /** Number of connections opened so far. */
  connections = 0;
  /**
   * Why nothing moves now: the server's reason for a pause (a full disk or backlog, for instance), or the error after
   * which the stream reconnects. Empty while it moves.
   */
  waiting = "";

  private readonly ledger: Ledger;
  private readonly changes = new Changes();
  private readonly endController = new AbortController();
  /** Aborted when the stream ends, with the reason. */
  private readonly endSignal: AbortSignal;
  private readonly ended: Promise<void>;
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
    this.endSignal = AbortSignal.any([this.endController.signal, link.closed, ...(options.signal ? [options.signal] : [])]);
    this.ended = this.runConnections();
  }

  /** Resolves when the server has answered. */
  async waitUntilOpen(): Promise<void> {
    await this.waitUntil(() => this.connections > 0, this.options.signal);
  }

  /** The number of the next observation; after a restart, the position at which to resume reading your source. */
  get expectedSequence(): bigint {
    return this.ledger.last + 1n;
  }

  /** Everything up to this number is durable, or rejected. */
  get received(): bigint {
    return this.ledger.received;
  }

  /** Everything up to this number is visible to every recall, or rejected. */
  get stored(): bigint {
    return this.ledger.stored;
  }

  /** Everything up to this number is in the vector index, or needs none. */
  get indexed(): bigint {
    return this.ledger.indexed;
  }

  /** The memory's revision at `stored`: pass it to a recall as `minRevision`. */
  get revision(): bigint {
    return this.ledger.revision;
  }

  /** The results of the producer's earlier numbers; undefined unless `knownSequence` was set. */
  get resumption(): Resumption | undefined {
    return this.ledger.resumption;
  }

  /** The latest 1,000 rejections; `rejectedCount` counts all. */
  get rejected(): readonly RejectedObservation[] {
    return this.ledger.rejected;
  }

  /** Number of rejected observations. */
  get rejectedCount(): number {
    return this.ledger.rejectedCount;
  }

  /**
   * Numbers and queues an observation; waits only while the window is full. If this rejects, the observation is not
   * queued.
   */
  async send(what: Observable, options: WaitOptions = {}): Promise<Sent> {
    checkOptions("options", options, { signal: true });
    const { signal } = options;
    signal?.throwIfAborted();
    const observation = toObservation(what);
    const size = toBinary(ObservationSchema, observation).length;
    this.checkAccepts(size);
    if (this.waitingTurns === 0 && this.ledger.hasRoom(size)) return this.queueObservation(observation, size);
    return this.queueWhenRoom(observation, size, signal);
  }

  /** Waits until everything sent so far has reached the stream's `ackLevel`. Rejected observations do not fail it. */
  async flush({ signal }: WaitOptions = {}): Promise<void> {
    const target = this.ledger.last;
    const level = this.options.ackLevel ?? AckLevel.STORED;
    if (this.ledger.acknowledgedUpTo(level) >= target) return;
    this.checkUsable();
    // The server acknowledges unasked: a flush request would cost one more message each way.
    await this.waitUntil(() => this.ledger.acknowledgedUpTo(level) >= target, signal);
  }

  /** Flushes, tells the server that the producer has finished, and resolves when everything is stored. */
  async close({ signal }: WaitOptions = {}): Promise<void> {
    if (this.error && !this.closed) throw this.error;
    this.closing = true;
    this.changes.notify();
    try {
      await this.waitUntil(() => this.closed, signal);
    } finally {
      await this.abandon();
    }
  }

  /** Ends the stream without flushing: observations that were not received are lost. */
  async abandon(): Promise<void> {
    this.endController.abort(new ClosedError());
    await this.ended;
  }

  /** `await using` abandons a stream that was not closed. */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.abandon();
  }

  private queueObservation(observation: Observation, size: number): Sent {
    this.checkAccepts(size);
    const sent = this.ledger.addObservation(observation, size);
    this.changes.notify();
    return sent;
  }

  /** Waits for room in the window, then queues: first come, first numbered. */
  private async queueWhenRoom(observation: Observation, size: number, signal?: AbortSignal): Promise<Sent> {
    let sent: Sent | undefined;
    let leave!: () => void;
    const left = new Promise<void>((resolve) => { leave = resolve; });
    const mine = new Changes();
    void this.turn.then(() => { mine.notify(); });
    this.turn = this.turn.then(() => left); // an aborted send keeps the order of the others
    this.waitingTurns += 1;
    try {
      await mine.next(signal);
      await this.waitUntil(() => {
        // A later connection may grant a smaller window.
        if (!this.ledger.hasRoom(size) && size <= this.ledger.sizeMax) return false;
        sent = this.queueObservation(observation, size);
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

  private checkAccepts(size: number): void {
    this.checkUsable();
    if (size > this.ledger.sizeMax) {
      throw invalidField("observation", `has ${size} bytes, the server takes at most ${this.ledger.sizeMax}`);
    }
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
    this.ledger.failPending(error);
    this.changes.notify();
  }

  private async runConnection(backoff: Backoff): Promise<void> {
    const connection = new ConnectionState();
    const signal = AbortSignal.any([connection.abort.signal, this.endSignal]);
    try {
      const headers = this.link.route(this.memory);
      for await (const response of this.link.streams.observe(this.requests(connection, signal), { signal, headers })) {
        if (!connection.isOpen) {
          if (this.handleOpening(response, connection)) backoff.markOpened();
        } else if (this.handleResponse(response, connection)) {
          backoff.markProgress();
        }
      }
      if (!this.closed) throw unavailableError("the server ended the stream");
    } catch (thrown) {
      if (this.closed) return; // the last message has settled everything
      this.waiting = asError(thrown).message;
      throw thrown;
    } finally {
      connection.abort.abort();
    }
  }

  /** Handles the answer to `open` and the resumption that follows; returns whether the connection is open. */
  private handleOpening({ message }: ObserveResponse, connection: ConnectionState): boolean {
    if (message.case === "goingAway") throw shuttingDownError(message.value);
    const known = connection.known;
    let { opening } = connection;
    if (opening === undefined) {
      if (message.case !== "opened") throw notOpenedError(message.case);
      const { rejected, outcomes, resumed } = message.value;
      opening = connection.opening = { opened: message.value, rejected, outcomes, resumed };
    } else {
      const resumed = message.case === "ack" ? message.value.resumed : 0n;
      if (message.case !== "ack" || resumed <= opening.resumed) {
        const range = `${opening.resumed.toString()} of ${opening.opened.resumeTo.toString()}`;
        throw protocolViolationError(`the server resumed up to ${range}, and no further`);
      }
      opening.rejected.push(...message.value.rejected);
      opening.outcomes.push(...message.value.outcomes);
      opening.resumed = resumed;
    }
    const { opened, rejected, outcomes } = opening;
    this.link.connections.allowCalls(opened.limits?.connectionStreamsMax ?? 0);
    if (opening.resumed < opened.resumeTo) return false;
    if (known !== undefined) this.ledger.applyResumption(opened, rejected, outcomes);
    this.ledger.applyOpened(opened);
    connection.isOpen = true;
    this.connections += 1;
    this.changes.notify();
    return true;
  }

  /** Handles one response and returns whether it was progress. Throws SHUTTING_DOWN when it is time to reconnect. */
  private handleResponse({ message }: ObserveResponse, connection: ConnectionState): boolean {
    let progress = false;
    if (message.case === "ack") {
      if (connection.repeatsFlush && message.value.flushed >= connection.repeatsFlush) {
        connection.repeatsFlush = 0n;
        this.ledger.settleRepeats();
      }
      progress = this.ledger.applyAck(message.value);
    } else if (message.case === "closed") {
      this.ledger.settleRepeats(); // no further acknowledgement follows
      this.ledger.applyAck(message.value);
      this.closed = progress = true;
    } else if (message.case === "throttle") {
      this.waiting = message.value.description;
      this.pauseUntil = performance.now() + durationMs(message.value.retryDelay);
    } else if (message.case === "goingAway") {
      // The server may still acknowledge what is in flight; the next connection sends the queue.
      connection.draining = true;
      const grace = Math.min(durationMs(message.value.grace), GRACE_MAX_MS);
      setTimeout(() => { connection.abort.abort(); }, grace).unref();
    }
    if (progress) this.waiting = "";
    this.changes.notify();
    if (connection.draining && !connection.closeSent && this.ledger.allReceived) throw shuttingDownError();
    return progress;
  }

  /** Yields the requests of a connection until it ends. */
  private async *requests(connection: ConnectionState, signal: AbortSignal): AsyncGenerator<ObserveRequest> {
    const { namespace, name } = this.memory;
    const { session = "", related = 0 } = this.options;
    const outcomes = this.options.outcomes || related > 0;
    let { ackLevel = AckLevel.UNSPECIFIED } = this.options;
    // ackLevel applies to the flush after repeats, the only one sent; it must not wait for the index.
    if (ackLevel === AckLevel.INDEXED) ackLevel = AckLevel.STORED;
    const known = connection.known = this.ledger.knownSequence;
    const resume = known === undefined ? {} : { knownSequence: known };
    yield toRequest({
      case: "open",
      value: { namespace, memory: name, producer: this.producer, session, ackLevel, outcomes, related, ...resume },
    });
    while (!signal.aborted) {
      const pause = this.pauseUntil - performance.now();
      if (pause > 0) {
        await sleep(pause, undefined, { signal }).catch(() => undefined);
        continue; // check again: a connection that has ended meanwhile must take nothing from the ledger
      }
      const next = connection.isOpen ? this.nextRequest(connection) : undefined;
      if (next) yield next;
      else if (connection.closeSent) return;
      else await this.changes.next(signal).catch(() => undefined); // the loop condition sees the abort
    }
  }

  private nextRequest(connection: ConnectionState): ObserveRequest | undefined {
    if (connection.draining || connection.closeSent) return undefined;
    if (this.ledger.repeatsSent && connection.repeatsFlush === 0n) {
      connection.repeatsFlush = ++this.flushIds;
      return toRequest({ case: "flush", value: { flushId: connection.repeatsFlush } });
    }
    const batch = this.ledger.nextBatch();
    if (batch) return toRequest({ case: "batch", value: batch });
    if (!this.ledger.allSent) return undefined;
    if (!this.closing) return undefined;
    connection.closeSent = true;
    return toRequest({ case: "close", value: {} });
  }
}

function toRequest(message: NonNullable<MessageInitShape<typeof ObserveRequestSchema>["message"]>): ObserveRequest {
  return create(ObserveRequestSchema, { message });
}
