/** Waiting for what somebody else changes. */
import { Code } from "@connectrpc/connect";

import { MemstreamError } from "./errors.js";

/** Something that changes, and those who wait for it. */
export class Changes {
  private waiting = new Set<() => void>();

  /** Wakes whoever waits. */
  notify(): void {
    const woken = this.waiting;
    this.waiting = new Set();
    for (const wake of woken) wake();
  }

  /** Until the next change; throws when the signal is aborted. */
  next(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(aborted(signal));
        return;
      }
      const wake = (): void => {
        signal?.removeEventListener("abort", stop);
        resolve();
      };
      const stop = (): void => {
        this.waiting.delete(wake);
        reject(aborted(signal));
      };
      signal?.addEventListener("abort", stop, { once: true });
      this.waiting.add(wake);
    });
  }
}

/** What a wait fails with that its signal ended. */
export function aborted(signal: AbortSignal | undefined): MemstreamError {
  const reason: unknown = signal?.reason;
  if (reason instanceof MemstreamError) return reason;
  const late = reason instanceof Error && reason.name === "TimeoutError";
  return new MemstreamError(
    late ? "there was no answer in time" : "it was given up",
    late ? Code.DeadlineExceeded : Code.Canceled,
    {},
    reason,
  );
}
