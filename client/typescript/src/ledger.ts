/**
 * Tracks the observations of a producer that are not yet stored: numbers, window, batches, acknowledgements; no I/O.
 *
 * Rule 1: an observation gets its number once, in order, and keeps it across connections.
 * Rule 2: an observation is buffered until it is stored, and resent on each new connection until it is received. The
 * server recognises a repeat by number and content, so that it counts once.
 * Rule 3: the observations buffered but not received never exceed the granted window, in count and in bytes.
 * Rule 4: an observation that the server had received before this connection, without acknowledging it, is settled by the
 * answer to its repeat, not by its number: only that answer says whether it was rejected. A flush after the last repeat
 * marks that point.
 * Rule 5: up to `stored`, every rejection and outcome is known here. A new connection requests those of later numbers and
 * reads them first, so that a lost connection loses none.
 */
import { create } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";

import { fromStatus, MemstreamError, ServerBehindError } from "./errors.js";
import { ErrorReason } from "./gen/memstream/v1/error_pb.js";
import type { Observation } from "./gen/memstream/v1/fragment_pb.js";
import { AckLevel, ObservationBatchSchema } from "./gen/memstream/v1/stream_service_pb.js";
import type {
  Ack,
  ObservationBatch,
  ObservationOutcome,
  ObserveClosed,
  ObserveOpened,
  RejectedObservation,
} from "./gen/memstream/v1/stream_service_pb.js";
import { Sent } from "./sent.js";

/** Observations in one message; gRPC's cost is per message, and larger batches are not cheaper. */
const BATCH_MAX = 128;
/** Bytes of observations in one message; larger messages are not faster. */
const BATCH_BYTES_MAX = 1 << 20;
/** gRPC's default limit, if the server names none. */
const MESSAGE_BYTES = 4 << 20;
/** Overhead of a message with one observation. */
const FRAME_BYTES = 64;
/** Rejections that a stream keeps. */
const REJECTED_KEPT = 1000;

/** A numbered observation and its size on the wire in bytes. */
interface Item {
  readonly sent: Sent;
  readonly observation: Observation | undefined;
  readonly size: number;
}

/** The results of the observations that an earlier process of the producer sent. */
export interface Resumption {
  /** The rejections after `knownSequence`. */
  readonly rejected: readonly RejectedObservation[];
  /** The outcomes of stored observations after `knownSequence`, if the stream was opened with `outcomes`. */
  readonly outcomes: readonly ObservationOutcome[];
  /** `rejected` is complete from this number on: `knownSequence` + 1, or more if the server no longer has older ones. */
  readonly rejectedSince: bigint;
  /** `outcomes` is complete from this number on. */
  readonly outcomesSince: bigint;
}

/** A first-in, first-out queue of items and the sum of their bytes. */
class ItemQueue {
  bytes = 0;
  private items: Item[] = [];
  private start = 0;

  get length(): number {
    return this.items.length - this.start;
  }

  get first(): Item | undefined {
    return this.items[this.start];
  }

  push(item: Item): void {
    this.items.push(item);
    this.bytes += item.size;
  }

  shift(): Item | undefined {
    const item = this.items[this.start];
    if (item === undefined) return undefined;
    this.start += 1;
    this.bytes -= item.size;
    if (this.start > 1000 && this.start * 2 > this.items.length) {
      this.items = this.items.slice(this.start); // lets the observations be freed
      this.start = 0;
    }
    return item;
  }

  /** Removes and returns the items from number `first` on. */
  removeFrom(first: bigint): Item[] {
    const all = this.items.slice(this.start);
    const kept = all.filter((item) => item.sent.sequence < first);
    this.replace(kept);
    return all.slice(kept.length);
  }

  /** Puts items at the front. */
  unshift(items: readonly Item[]): void {
    this.replace([...items, ...this.items.slice(this.start)]);
  }

  private replace(items: Item[]): void {
    this.items = items;
    this.start = 0;
    this.bytes = items.reduce((sum, item) => sum + item.size, 0);
  }
}

const maxOf = (one: bigint, other: bigint): bigint => (one > other ? one : other);
const minOf = (one: bigint, other: bigint): bigint => (one < other ? one : other);

/** The numbered observations of one stream. */
export class Ledger {
  received = 0n;
  stored = 0n;
  indexed = 0n;
  revision = 0n;
  last = 0n;
  rejected: RejectedObservation[] = [];
  rejectedCount = 0;
  resumption: Resumption | undefined;

  private started = false;
  private repeatsUpto = 0n;
  private batchMax = BATCH_MAX;
  private batchBytes = BATCH_BYTES_MAX;
  private messageBytes = MESSAGE_BYTES;
  private windowObservations = 0;
  private windowBytes = 0;
  private readonly pending = new Map<bigint, Sent>();
  /** To send on this connection. */
  private readonly queue = new ItemQueue();
  /** Sent on this connection, not received. */
  private readonly flight = new ItemQueue();
  /** Received, not stored, buffered in case the server loses them. */
  private readonly kept = new ItemQueue();
  /** As kept, but over the byte limit of the buffer, so only their numbers are known. */
  private readonly bare = new ItemQueue();

  /** `known` is the last number whose result an earlier process of the producer knew. */
  constructor(private readonly known: bigint | undefined) {}

  /** The `known_sequence` of `open`; undefined requests nothing. */
  get knownSequence(): bigint | undefined {
    return this.started ? this.stored : this.known;
  }

  /** Records the rejections and outcomes requested by `knownSequence`; call it before `applyOpened`. */
  applyResumption(
    opened: ObserveOpened,
    rejected: readonly RejectedObservation[],
    outcomes: readonly ObservationOutcome[],
  ): void {
    if (this.started) {
      this.rejectItems(rejected);
      this.recordOutcomes(outcomes);
    } else {
      this.resumption = { rejected, outcomes, rejectedSince: opened.rejectedSince, outcomesSince: opened.outcomesSince };
    }
  }

  /**
   * Handles an opened connection: the first sets the next number, later ones decide what to resend. Throws a
   * ServerBehindError if the server expects acknowledged numbers that are no longer buffered, PRODUCER_SUPERSEDED if
   * another process has used numbers of this producer.
   */
  applyOpened(opened: ObserveOpened): void {
    this.setWindow(opened);
    if (!this.started) {
      this.started = true;
      this.received = opened.received;
      this.stored = opened.stored;
      this.last = maxOf(opened.expectedSequence, 1n) - 1n;
      this.revision = opened.revision;
      return;
    }
    if (opened.expectedSequence > this.last + 1n) {
      throw new MemstreamError(
        `observation ${opened.expectedSequence.toString()} is expected, but only ${this.last.toString()} were made ` +
          "here: another process uses this producer's name",
        Code.Aborted,
        { reason: ErrorReason.PRODUCER_SUPERSEDED },
      );
    }
    this.queue.unshift(this.flight.removeFrom(0n));
    this.repeatsUpto = opened.received > this.received ? opened.received : 0n;
    if (opened.expectedSequence <= this.received) this.rollBack(opened.expectedSequence);
    // Only this message reports what was stored meanwhile. Not for repeats: they may have been rejected.
    this.revision = opened.revision; // lower than before if the server was restored
    this.markStored(minOf(opened.stored, this.received));
  }

  /** Bytes of the largest observation that fits into an empty window and a message. */
  get sizeMax(): number {
    return Math.min(this.windowBytes, this.messageBytes - FRAME_BYTES);
  }

  /** Whether the window has room for an observation of that many bytes. */
  hasRoom(size: number): boolean {
    const count = this.queue.length + this.flight.length;
    return count < this.windowObservations && this.queue.bytes + this.flight.bytes + size <= this.windowBytes;
  }

  /** Numbers an observation and queues it. */
  addObservation(observation: Observation, size: number): Sent {
    this.last += 1n;
    const sent = new Sent(this.last);
    this.pending.set(sent.sequence, sent);
    this.queue.push({ sent, observation, size });
    return sent;
  }

  /** The next batch, as large as the window and a message allow; undefined when nothing may be sent. */
  nextBatch(): ObservationBatch | undefined {
    let first = 0n;
    let size = 0;
    const observations: Observation[] = [];
    for (let next = this.queue.first; next?.observation && this.maySend(next); next = this.queue.first) {
      const sequence = next.sent.sequence;
      if (observations.length === 0) first = sequence;
      else if (observations.length === this.batchMax || size + next.size > this.batchBytes) break;
      else if (first <= this.repeatsUpto && this.repeatsUpto < sequence) break;
      this.queue.shift();
      this.flight.push(next);
      observations.push(next.observation);
      size += next.size;
    }
    if (observations.length === 0) return undefined;
    return create(ObservationBatchSchema, { firstSequence: first, observations });
  }

  /** Whether all repeats that may be sent are sent but not settled: time to flush. */
  get repeatsSent(): boolean {
    const next = this.queue.first;
    if (next === undefined || next.sent.sequence > this.repeatsUpto) return this.repeatsUpto > 0n;
    return !this.maySend(next); // the window has shrunk since they were first sent
  }

  /** Records the answer to the flush after the last repeat. */
  settleRepeats(): void {
    const next = this.queue.first;
    if (next && next.sent.sequence <= this.repeatsUpto) this.markReceived(next.sent.sequence - 1n);
    else this.repeatsUpto = 0n;
  }

  get allSent(): boolean {
    return this.queue.length === 0;
  }

  get allReceived(): boolean {
    return this.flight.length === 0;
  }

  /** The number up to which everything has reached `level`. */
  acknowledgedUpTo(level: AckLevel): bigint {
    if (level === AckLevel.RECEIVED) return this.received;
    return level === AckLevel.INDEXED ? this.indexed : this.stored;
  }

  /** Applies an acknowledgement and returns whether there was progress; repeated and outdated ones change nothing. */
  applyAck(ack: Ack | ObserveClosed): boolean {
    this.rejectItems(ack.rejected);
    this.recordOutcomes(ack.outcomes);
    this.revision = maxOf(this.revision, ack.revision);
    const settled = this.repeatsUpto > 0n ? this.received : ack.received;
    const stored = minOf(ack.stored, maxOf(settled, this.received));
    const progress = settled > this.received || stored > this.stored;
    this.markReceived(settled);
    this.markStored(stored);
    if ("indexed" in ack) this.indexed = maxOf(this.indexed, minOf(ack.indexed, this.stored));
    return progress;
  }

  /** Ends the stream: every pending observation fails with `error`. */
  failPending(error: Error): void {
    for (const sent of this.pending.values()) sent.markFailed(error);
  }

  private rejectItems(all: readonly RejectedObservation[]): void {
    for (const rejected of all) {
      if (!this.pending.get(rejected.sequence)?.markFailed(fromStatus(rejected.status))) continue;
      this.rejectedCount += 1;
      this.rejected.push(rejected);
      if (this.rejected.length > REJECTED_KEPT) this.rejected.shift();
    }
  }

  private recordOutcomes(all: readonly ObservationOutcome[]): void {
    for (const outcome of all) {
      const sent = this.pending.get(outcome.sequence);
      if (sent) sent.outcome = outcome;
    }
  }

  private setWindow(opened: ObserveOpened): void {
    const messageMax = opened.limits?.messageBytesMax ?? 0;
    const batchMax = opened.limits?.batchMax ?? 0;
    this.messageBytes = messageMax || MESSAGE_BYTES;
    // Half: the message adds overhead to every observation.
    this.batchBytes = messageMax ? Math.min(BATCH_BYTES_MAX, messageMax / 2) : BATCH_BYTES_MAX;
    if (batchMax) this.batchMax = Math.min(this.batchMax, batchMax);
    this.windowObservations = Math.max(opened.windowObservations, 1);
    this.windowBytes = Math.max(Number(opened.windowBytes), 1);
  }

  private maySend(next: Item): boolean {
    if (this.flight.length === 0) return true;
    return this.flight.bytes + next.size <= this.windowBytes && this.flight.length < this.windowObservations;
  }

  private rollBack(expected: bigint): void {
    const oldest = this.kept.first;
    if (oldest === undefined || oldest.sent.sequence > expected) throw new ServerBehindError(expected, this.received);
    this.queue.unshift(this.kept.removeFrom(expected));
    this.received = expected - 1n;
  }

  private markReceived(upto: bigint): void {
    for (let item = this.flight.first; item && item.sent.sequence <= upto; item = this.flight.first) {
      this.flight.shift();
      this.kept.push(item);
      while (this.kept.bytes > this.windowBytes) {
        const oldest = this.kept.shift();
        if (oldest) this.bare.push({ sent: oldest.sent, observation: undefined, size: 0 });
      }
    }
    this.received = maxOf(this.received, upto);
  }

  private markStored(upto: bigint): void {
    for (const queue of [this.bare, this.kept]) {
      for (let item = queue.first; item && item.sent.sequence <= upto; item = queue.first) {
        queue.shift();
        this.pending.delete(item.sent.sequence);
        item.sent.markStored(this.revision);
      }
    }
    this.stored = maxOf(this.stored, upto);
  }
}
