/** The Watch stream: every event of a memory after a cursor, over any number of connections, once each. */
import { create } from "@bufbuild/protobuf";

import { Backoff, repeatUntilDone } from "./backoff.js";
import { asError, shuttingDownError, unavailableError } from "./errors.js";
import type { Cursor, Event, EventType } from "./gen/memstream/v1/event_pb.js";
import { CursorSchema } from "./gen/memstream/v1/event_pb.js";
import type { Fragment } from "./gen/memstream/v1/fragment_pb.js";
import type { WatchResponse } from "./gen/memstream/v1/stream_service_pb.js";
import type { Link, MemoryPath } from "./link.js";

/** Options of a watch. */
export interface WatchOptions {
  /** Where to start: after a stored cursor, now (the default), or at the memory's first event. */
  readonly from?: Cursor | "now" | "beginning";
  /** Only events of these types; empty for all. */
  readonly types?: readonly EventType[];
  /** Include the events' fragments, as they are when the event is sent. */
  readonly includeFragments?: boolean;
  /** Ends the watch: the loop over it throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** An event and, with `includeFragments`, its fragment. */
export interface WatchedEvent {
  readonly event: Event;
  readonly fragment: Fragment | undefined;
}

/** A memory's events, created by `Memory.watch`. Iterate over it once; leaving the loop ends it. */
export class Watch implements AsyncIterable<WatchedEvent> {
  /** Number of connections opened so far. */
  connections = 0;
  /** The position for a later watch: after the last event yielded or the last progress mark. */
  cursor: Cursor | undefined;

  private readonly endController = new AbortController();
  private ahead: WatchedEvent[] = [];

  /** Use `Memory.watch`. */
  constructor(
    private readonly link: Link,
    private readonly memory: MemoryPath,
    private readonly options: WatchOptions,
  ) {}

  /** Ends the watch: the loop over it ends. */
  close(): void {
    this.endController.abort();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<WatchedEvent, void, undefined> {
    const given = this.options.signal;
    const signal = AbortSignal.any([this.endController.signal, this.link.closed, ...(given ? [given] : [])]);
    const backoff = new Backoff(this.link.retry);
    let disconnect = new AbortController();
    let reading: AsyncIterator<WatchResponse> | undefined;
    const readMessage = async (): Promise<void> => {
      if (reading === undefined) {
        disconnect = new AbortController();
        reading = this.connect(AbortSignal.any([signal, disconnect.signal]));
      }
      try {
        const next = await reading.next();
        if (next.done) throw unavailableError("the server ended the stream");
        this.handleResponse(next.value);
        backoff.markOpened();
        backoff.markProgress();
      } catch (thrown) {
        disconnect.abort();
        reading = undefined;
        throw thrown;
      }
    };
    try {
      this.cursor = await this.firstCursor(signal);
      while (!signal.aborted) {
        const next = this.ahead.shift();
        if (next === undefined) {
          await repeatUntilDone(readMessage, backoff, signal);
          continue;
        }
        this.cursor = next.event.cursor;
        yield next;
      }
      if (!this.endController.signal.aborted) signal.throwIfAborted();
    } catch (thrown) {
      if (this.endController.signal.aborted) return;
      signal.throwIfAborted();
      throw asError(thrown);
    } finally {
      this.endController.abort();
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

  /** Resolves "now" once: the server's "now" would move with each reconnect. */
  private async firstCursor(signal: AbortSignal): Promise<Cursor> {
    const from = this.options.from ?? "now";
    if (typeof from !== "string") return from;
    const { namespace, name } = this.memory;
    const { memory } = await this.link.memories.getMemory({ namespace, memory: name }, { signal });
    return create(CursorSchema, {
      memoryUid: memory?.uid ?? "",
      revision: from === "beginning" ? 0n : (memory?.revision ?? 0n),
    });
  }

  private handleResponse({ message }: WatchResponse): void {
    if (message.case === "goingAway") throw shuttingDownError(message.value);
    if (message.case === "progress") this.cursor = message.value.cursor;
    if (message.case !== "events") return;
    const fragments = new Map(message.value.fragments.map((one) => [one.id, one]));
    this.ahead.push(...message.value.events.map((event) => ({ event, fragment: fragments.get(event.fragmentId) })));
  }
}
