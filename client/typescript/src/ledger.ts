/**
 * What a producer has said and the server has not yet stored: numbers, window, batches, acknowledgements; no I/O.
 *
 * Rule 1: an observation gets its number once, in order, and keeps it over every connection.
 * Rule 2: it is held until it is stored, and sent again on a new connection until it is received; the server knows a
 * repeat by its number and content, so that it counts once.
 * Rule 3: what is held and not received never exceeds the window granted, in observations and in bytes.
 * Rule 4: what the server had received before a connection, and had not acknowledged, is settled by the answer to its
 * repeat and not by its number: only that answer tells whether it was refused. A flush after the last repeat marks it.
 * Rule 5: up to `stored` every refusal and outcome is known here. A new connection asks for those of later numbers and
 * takes them before anything else, so that none is lost with a connection.
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

/** Observations in one message; gRPC's cost is by the message, and more do not make it cheaper. */
const BATCH_MAX = 128;
/** Bytes of observations in one message; larger ones do not go faster. */
const BATCH_BYTES_MAX = 1 << 20;
/** gRPC's own limit, where the server names none. */
const MESSAGE_BYTES = 4 << 20;
/** Around a lone observation in its message. */
const FRAME_BYTES = 64;
const REJECTED_KEPT = 1000;

interface Item {
  readonly sent: Sent;
  readonly observation: Observation | undefined;
  readonly size: number;
}

/** What became of the numbers that an earlier process of the producer had sent. */
export interface Resumption {
  /** Those that were refused, after `knownSequence`. */
  readonly rejected: readonly RejectedObservation[];
  /** What became of those that are stored, after `knownSequence`, if the stream asked for outcomes. */
  readonly outcomes: readonly ObservationOutcome[];
  /** From this number on, every refusal is there: `knownSequence` + 1, or more where older ones are no longer kept. */
  readonly rejectedSince: bigint;
  /** From this number on, every outcome is there. */
  readonly outcomesSince: bigint;
}

/** Items in order, and their bytes. */
class Line {
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
      this.items = this.items.slice(this.start); // what is settled is not held
      this.start = 0;
    }
    return item;
  }

  /** Takes away what is numbered `from` or more. */
  cut(from: bigint): Item[] {
    const all = this.items.slice(this.start);
    const kept = all.filter((item) => item.sent.sequence < from);
    this.replace(kept);
    return all.slice(kept.length);
  }

  /** Puts items before the others. */
  unshift(items: readonly Item[]): void {
    this.replace([...items, ...this.items.slice(this.start)]);
  }

  private replace(items: Item[]): void {
    this.items = items;
    this.start = 0;
    this.bytes = items.reduce((sum, item) => sum + item.size, 0);
  }
}

const larger = (one: bigint, other: bigint): bigint => (one > other ? one : other);
const smaller = (one: bigint, other: bigint): bigint => (one < other ? one : other);

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
  private readonly waiting = new Map<bigint, Sent>();
  /** To be sent on this connection. */
  private readonly queue = new Line();
  /** Sent on it and not received. */
  private readonly flight = new Line();
  /** Received and not stored, held in case the server loses them. */
  private readonly kept = new Line();
  /** As kept, but beyond the bytes worth holding: only their numbers are known. */
  private readonly bare = new Line();

  /** `known` is what an earlier process of the producer knew. */
  constructor(private readonly known: bigint | undefined) {}

  /** What to say to the server that is known here; undefined where there is nothing to ask for. */
  get knownSequence(): bigint | undefined {
    return this.started ? this.stored : this.known;
  }

  /** Takes all refusals and outcomes of before this connection that were asked for; it comes before `opened`. */
  resumed(opened: ObserveOpened, rejected: readonly RejectedObservation[], outcomes: readonly ObservationOutcome[]): void {
    if (this.started) {
      this.refuse(rejected);
      this.note(outcomes);
    } else {
      this.resumption = { rejected, outcomes, rejectedSince: opened.rejectedSince, outcomesSince: opened.outcomesSince };
    }
  }

  /** A connection is open: the first says where to go on numbering, later ones what to send again. */
  opened(opened: ObserveOpened): void {
    this.grant(opened);
    if (!this.started) {
      this.started = true;
      this.received = opened.received;
      this.stored = opened.stored;
      this.last = larger(opened.expectedSequence, 1n) - 1n;
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
    this.queue.unshift(this.flight.cut(0n));
    this.repeatsUpto = opened.received > this.received ? opened.received : 0n;
    if (opened.expectedSequence <= this.received) this.rollBack(opened.expectedSequence);
    // What was stored meanwhile is said here alone, of what repeats nothing yet: it may have been refused.
    this.revision = opened.revision; // lower than it was where the server was restored
    this.store(smaller(opened.stored, this.received));
  }

  /** Bytes of the largest observation that any window and message admits. */
  get sizeMax(): number {
    return Math.min(this.windowBytes, this.messageBytes - FRAME_BYTES);
  }

  /** Whether the window admits one more of that many bytes. */
  hasRoom(size: number): boolean {
    const count = this.queue.length + this.flight.length;
    return count < this.windowObservations && this.queue.bytes + this.flight.bytes + size <= this.windowBytes;
  }

  /** Numbers an observation and queues it. */
  add(observation: Observation, size: number): Sent {
    this.last += 1n;
    const sent = new Sent(this.last);
    this.waiting.set(sent.sequence, sent);
    this.queue.push({ sent, observation, size });
    return sent;
  }

  /** What to send now, as much as the window and a message allow; undefined when nothing may go. */
  nextBatch(): ObservationBatch | undefined {
    let first = 0n;
    let size = 0;
    const observations: Observation[] = [];
    for (let next = this.queue.first; next?.observation && this.mayFly(next); next = this.queue.first) {
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

  /** Whether repeats on this connection are not settled, and all that may be sent are: time for the flush. */
  get repeatsSent(): boolean {
    const next = this.queue.first;
    if (next === undefined || next.sent.sequence > this.repeatsUpto) return this.repeatsUpto > 0n;
    return !this.mayFly(next); // the window is smaller than it was when they were sent first
  }

  /** The flush after the last repeat sent is answered. */
  repeatsSettled(): void {
    const next = this.queue.first;
    if (next && next.sent.sequence <= this.repeatsUpto) this.receive(next.sent.sequence - 1n);
    else this.repeatsUpto = 0n;
  }

  get allSent(): boolean {
    return this.queue.length === 0;
  }

  get allReceived(): boolean {
    return this.flight.length === 0;
  }

  /** The number up to which everything has come that far. */
  position(level: AckLevel): bigint {
    if (level === AckLevel.RECEIVED) return this.received;
    return level === AckLevel.INDEXED ? this.indexed : this.stored;
  }

  /** Takes an acknowledgement; repeated and outdated ones change nothing. Whether there was progress. */
  acknowledged(ack: Ack | ObserveClosed): boolean {
    this.refuse(ack.rejected);
    this.note(ack.outcomes);
    this.revision = larger(this.revision, ack.revision);
    const settled = this.repeatsUpto > 0n ? this.received : ack.received;
    const stored = smaller(ack.stored, larger(settled, this.received));
    const progress = settled > this.received || stored > this.stored;
    this.receive(settled);
    this.store(stored);
    if ("indexed" in ack) this.indexed = larger(this.indexed, smaller(ack.indexed, this.stored));
    return progress;
  }

  /** The stream is over: whoever waits for an observation is told. */
  fail(error: Error): void {
    for (const sent of this.waiting.values()) sent.refuse(error);
  }

  private refuse(all: readonly RejectedObservation[]): void {
    for (const refused of all) {
      if (!this.waiting.get(refused.sequence)?.refuse(fromStatus(refused.status))) continue;
      this.rejectedCount += 1;
      this.rejected.push(refused);
      if (this.rejected.length > REJECTED_KEPT) this.rejected.shift();
    }
  }

  private note(all: readonly ObservationOutcome[]): void {
    for (const outcome of all) {
      const sent = this.waiting.get(outcome.sequence);
      if (sent) sent.outcome = outcome;
    }
  }

  private grant(opened: ObserveOpened): void {
    const messageMax = opened.limits?.messageBytesMax ?? 0;
    const batchMax = opened.limits?.batchMax ?? 0;
    this.messageBytes = messageMax || MESSAGE_BYTES;
    // Half of it: the message has a frame around every observation.
    this.batchBytes = messageMax ? Math.min(BATCH_BYTES_MAX, messageMax / 2) : BATCH_BYTES_MAX;
    if (batchMax) this.batchMax = Math.min(this.batchMax, batchMax);
    this.windowObservations = Math.max(opened.windowObservations, 1);
    this.windowBytes = Math.max(Number(opened.windowBytes), 1);
  }

  private mayFly(next: Item): boolean {
    if (this.flight.length === 0) return true;
    return this.flight.bytes + next.size <= this.windowBytes && this.flight.length < this.windowObservations;
  }

  private rollBack(expected: bigint): void {
    const oldest = this.kept.first;
    if (oldest === undefined || oldest.sent.sequence > expected) throw new ServerBehindError(expected, this.received);
    this.queue.unshift(this.kept.cut(expected));
    this.received = expected - 1n;
  }

  private receive(upto: bigint): void {
    for (let item = this.flight.first; item && item.sent.sequence <= upto; item = this.flight.first) {
      this.flight.shift();
      this.kept.push(item);
      while (this.kept.bytes > this.windowBytes) {
        const oldest = this.kept.shift();
        if (oldest) this.bare.push({ sent: oldest.sent, observation: undefined, size: 0 });
      }
    }
    this.received = larger(this.received, upto);
  }

  private store(upto: bigint): void {
    for (const line of [this.bare, this.kept]) {
      for (let item = line.first; item && item.sent.sequence <= upto; item = line.first) {
        line.shift();
        this.waiting.delete(item.sent.sequence);
        item.sent.store(this.revision);
      }
    }
    this.stored = larger(this.stored, upto);
  }
}
