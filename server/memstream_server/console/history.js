// The events of one fragment, found in the memory's log. The log has no index by fragment: it is read in parts.

import { stream } from "./api.js";

/** Events read before the reader is asked to go on. */
export const PART_EVENTS = 20_000;

/** Whether an event is about a fragment: it happened to it, or the fragment took part in it. */
export function concerns(event, id) {
  return event.fragmentId === id || event.otherId === id || (event.sources ?? []).includes(id);
}

/**
 * Reads on from `cursor` until the events of `revision`, or PART_EVENTS. `onEvents(events, read)` gets the fragment's
 * events as they are found. Returns { cursor, read, whole }; `whole` is whether the log was read to its end. Throws
 * CallError.
 */
export async function readHistory(memory, id, cursor, revision, signal, onEvents) {
  const reading = new AbortController();
  const both = AbortSignal.any([signal, reading.signal]);
  const found = { cursor, read: 0, whole: Number(cursor.revision ?? 0) >= Number(revision) };
  if (found.whole) return found;
  try {
    for await (const message of stream("StreamService/Watch", { ...memory, cursor, progressInterval: "1s" }, both)) {
      const events = message.events?.events ?? [];
      found.read += events.length;
      found.cursor = events.at(-1)?.cursor ?? message.progress?.cursor ?? found.cursor;
      onEvents(events.filter((event) => concerns(event, id)), found.read);
      found.whole = Number(found.cursor.revision ?? 0) >= Number(revision);
      if (found.whole || found.read >= PART_EVENTS) break;
    }
  } finally {
    reading.abort();
  }
  return found;
}
