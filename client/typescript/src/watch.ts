/** The Watch stream: every event of a memory after a cursor, over any number of connections, once each. */
import { create } from "@bufbuild/protobuf";

import { Backoff, persist } from "./backoff.js";
import { asError, shuttingDown, unavailable } from "./errors.js";
import type { Cursor, Event, EventType } from "./gen/memstream/v1/event_pb.js";
import { CursorSchema } from "./gen/memstream/v1/event_pb.js";
import type { Fragment } from "./gen/memstream/v1/fragment_pb.js";
import type { WatchResponse } from "./gen/memstream/v1/stream_service_pb.js";
import type { Link, MemoryPath } from "./link.js";

/** What is wanted of a watch. */
export interface WatchOptions {
  /** Where to begin: after a cursor that was kept, from now (the default), or from the memory's beginning. */
  readonly from?: Cursor | "now" | "beginning";
  /** Only these types; empty for all. */
  readonly types?: readonly EventType[];
  /** Send the fragments concerned, as they are when the event is sent. */
  readonly includeFragments?: boolean;
  /** Ends the watch: the loop over it throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** An event and, where the watch asked for it, the fragment concerned. */
export interface Happening {
  readonly event: Event;
  readonly fragment: Fragment | undefined;
}

/** A memory's events; made by `Memory.watch`. Iterate over it once; leaving the loop ends it. */
export class Watch implements AsyncIterable<Happening> {
  /** How many connections were opened. */
  connections = 0;
  /** Where a later watch would go on: after the last event handed out, or the last mark that nothing happened. */
  cursor: Cursor | undefined;

  private readonly end = new AbortController();
  private ahead: Happening[] = [];

  /** Use `Memory.watch`. */
  constructor(
    private readonly link: Link,
    private readonly memory: MemoryPath,
    private readonly options: WatchOptions,
  ) {}

  /** Ends the watch: the loop over it ends. */
  close(): void {
    this.end.abort();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Happening, void, undefined> {
    const given = this.options.signal;
    const signal = AbortSignal.any([this.end.signal, this.link.closed, ...(given ? [given] : [])]);
    const backoff = new Backoff(this.link.retry);
    let hangUp = new AbortController();
    let reading: AsyncIterator<WatchResponse> | undefined;
    const read = async (): Promise<void> => {
      if (reading === undefined) {
        hangUp = new AbortController();
        reading = this.connect(AbortSignal.any([signal, hangUp.signal]));
      }
      try {
        const next = await reading.next();
        if (next.done) throw unavailable("the server ended the stream");
        this.take(next.value);
        backoff.opened();
        backoff.progressed();
      } catch (thrown) {
        hangUp.abort();
        reading = undefined;
        throw thrown;
      }
    };
    try {
      this.cursor = await this.first(signal);
      while (!signal.aborted) {
        const next = this.ahead.shift();
        if (next === undefined) {
          await persist(read, backoff, signal);
          continue;
        }
        this.cursor = next.event.cursor;
        yield next;
      }
      if (!this.end.signal.aborted) signal.throwIfAborted();
    } catch (thrown) {
      if (this.end.signal.aborted) return;
      signal.throwIfAborted();
      throw asError(thrown);
    } finally {
      this.end.abort();
    }
  }

  private connect(signal: AbortSignal): AsyncIterator<WatchResponse> {
    this.connections += 1;
    const { types = [], includeFragments = false } = this.options;
    const where = { namespace: this.memory.namespace, memory: this.memory.name };
    const wanted = { types: [...types], includeFragments, ...(this.cursor && { cursor: this.cursor }) };
    const headers = this.link.route(this.memory);
    return this.link.streams.watch({ ...where, ...wanted }, { signal, headers })[Symbol.asyncIterator]();
  }

  /** Asked for once and by name: a server's "now" would move when a connection is made anew. */
  private async first(signal: AbortSignal): Promise<Cursor> {
    const from = this.options.from ?? "now";
    if (typeof from !== "string") return from;
    const { namespace, name } = this.memory;
    const { memory } = await this.link.memories.getMemory({ namespace, memory: name }, { signal });
    return create(CursorSchema, {
      memoryUid: memory?.uid ?? "",
      revision: from === "beginning" ? 0n : (memory?.revision ?? 0n),
    });
  }

  private take({ message }: WatchResponse): void {
    if (message.case === "goingAway") throw shuttingDown(message.value);
    if (message.case === "progress") this.cursor = message.value.cursor;
    if (message.case !== "events") return;
    const fragments = new Map(message.value.fragments.map((one) => [one.id, one]));
    this.ahead.push(...message.value.events.map((event) => ({ event, fragment: fragments.get(event.fragmentId) })));
  }
}
