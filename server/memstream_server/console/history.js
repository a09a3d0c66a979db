// The log of a memory, read in parts up to a revision: it has no index by fragment.

import { stream } from "./api.js";

/** Events read before the reader is asked to go on. */
export const PART_EVENTS = 20_000;

/**
 * Reads on from `cursor` until the events of `revision`, or PART_EVENTS; only events of `types`, if there are any.
 * `onEvents(events, read)` gets the events as they are read. Returns { cursor, read, whole }; `whole` is whether the log
 * was read to its end. Throws CallError.
 */
export async function readLog(memory, types, cursor, revision, signal, onEvents) {
  const reading = new AbortController();
  const both = AbortSignal.any([signal, reading.signal]);
  const found = { cursor, read: 0, whole: Number(cursor.revision ?? 0) >= Number(revision) };
  if (found.whole) return found;
  try {
    for await (const message of stream("StreamService/Watch", { ...memory, types, cursor, progressInterval: "1s" }, both)) {
      const events = message.events?.events ?? [];
      found.read += events.length;
      found.cursor = events.at(-1)?.cursor ?? message.progress?.cursor ?? found.cursor;
      onEvents(events, found.read);
      found.whole = Number(found.cursor.revision ?? 0) >= Number(revision);
      if (found.whole || found.read >= PART_EVENTS) break;
    }
  } finally {
    reading.abort();
  }
  return found;
}

/** Where the log begins that is still kept, if the error says so and it is after `cursor`; else null. */
export function beginsAfter(error, cursor) {
  const oldest = error.reason === "CURSOR_COMPACTED" ? error.detail("oldest_revision") : "";
  return oldest && Number(oldest) > Number(cursor.revision ?? 0) ? { memoryUid: cursor.memoryUid, revision: oldest } : null;
}
