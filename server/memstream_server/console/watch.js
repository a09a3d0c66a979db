// Watches one memory and resumes after a lost connection at the cursor.

import { CallError } from "./api.js";
import { pause, sharedStream } from "./shared_stream.js";

const BACKOFF_MIN_MS = 500;
const BACKOFF_MAX_MS = 10_000;

/**
 * Watches until `signal` aborts. `on.events(events, fragments)` gets what happened, `on.state(text, detail)` one of
 * "live", "reconnecting" and "ended", `on.void()` reads the memory again when the cursor is void and returns a new one.
 * Returns the last cursor.
 */
export async function watch(memory, cursor, signal, on) {
  let backoff = BACKOFF_MIN_MS;
  let at = cursor;
  let detail = "";
  const request = () => ({ ...memory, cursor: at, includeFragments: true, progressInterval: "2s" });
  const onMode = (inTurns) => { detail = inTurns ? "read every two seconds: other tabs have the browser's connections" : ""; };
  while (!signal.aborted) {
    try {
      for await (const message of sharedStream("StreamService/Watch", request, signal, (one) => Boolean(one.progress), onMode)) {
        backoff = BACKOFF_MIN_MS;
        on.state("live", detail);
        if (message.events) {
          const events = message.events.events ?? [];
          on.events(events, message.events.fragments ?? []);
          if (events.length) at = events[events.length - 1].cursor;
        } else if (message.progress) {
          at = message.progress.cursor;
        }
        if (signal.aborted) return at;
      }
    } catch (error) {
      if (signal.aborted) return at;
      if (!(error instanceof CallError)) throw error;
      if (error.reason.startsWith("CURSOR_")) {
        at = await on.void();
        continue;
      }
      if (!error.transient) {
        on.state("ended", error.message);
        return at;
      }
      on.state("reconnecting", error.message);
    }
    await pause(backoff * (0.5 + Math.random() / 2), signal);
    backoff = Math.min(2 * backoff, BACKOFF_MAX_MS);
  }
  return at;
}
