// Streams of all tabs of the browser: a few at a time, because it opens six connections to a server over HTTP/1.1.

import { stream } from "./api.js";

const SLOTS = 3; // the other connections are for calls
const POLL_MS = 2_000;
const QUICK = "0.2s"; // the server's mark that there is no more

/**
 * Yields the messages of a stream that ends with `signal`. `request()` continues after what was yielded. If other tabs
 * have the connections, it reads in turns: to the first message for which `isIdle` holds, every two seconds. `onMode`
 * gets whether it does.
 */
export async function* sharedStream(method, request, signal, isIdle, onMode = () => undefined) {
  for (;;) {
    const release = await takeSlot();
    onMode(!release);
    try {
      if (release) {
        yield* stream(method, request(), signal);
        return;
      }
      for await (const message of stream(method, { ...request(), progressInterval: QUICK }, signal)) {
        yield message;
        if (isIdle(message)) break;
      }
    } finally {
      release?.();
    }
    await pause(POLL_MS, signal);
    if (signal.aborted) return;
  }
}

/** Takes a place for a stream. Returns a function that gives it back; null if all are taken. */
async function takeSlot() {
  const [{ nextHopProtocol = "" } = {}] = performance.getEntriesByType("navigation");
  if (/^h[23]/.test(nextHopProtocol)) return () => undefined; // one connection takes all streams
  if (!navigator.locks) return null; // a page over plain HTTP does not know of other tabs
  for (let slot = 0; slot < SLOTS; slot += 1) {
    const release = await tryLock(`memstream stream ${slot}`);
    if (release) return release;
  }
  return null;
}

function tryLock(name) {
  return new Promise((resolve) => {
    navigator.locks.request(name, { ifAvailable: true }, (lock) => {
      if (lock) return new Promise((release) => { resolve(release); });
      resolve(null);
      return undefined;
    });
  });
}

/** Waits, or until the signal aborts. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
