/** When to open a broken stream again, and when to give up. */
import { setTimeout as sleep } from "node:timers/promises";

import { asError, isCut } from "./errors.js";
import type { MemstreamError } from "./errors.js";

/** How streams reconnect: full jitter up to a doubling delay, until so long has passed without progress. In ms. */
export interface Retry {
  /** Bounds the first opening: a wrong address is to be told soon. Default 10 s. */
  readonly firstMs: number;
  /** Bounds every reconnection: a server is restarted, upgraded or moved meanwhile. Default 2 min. */
  readonly laterMs: number;
  /** The bound of the first delay. Default 50 ms. */
  readonly delayMinMs: number;
  /** The bound of every delay. Default 5 s. */
  readonly delayMaxMs: number;
}

export const RETRY: Retry = { firstMs: 10_000, laterMs: 120_000, delayMinMs: 50, delayMaxMs: 5_000 };

/** Decides after each break of one stream. */
export class Backoff {
  private allowanceMs: number;
  private attempts = 0;
  private brokenSince: number | undefined;
  private openSince: number | undefined;

  constructor(private readonly retry: Retry) {
    this.allowanceMs = retry.firstMs;
  }

  /** The stream is open; that counts as progress once it has stayed so for the longest delay. */
  opened(): void {
    this.allowanceMs = this.retry.laterMs;
    this.openSince = performance.now();
  }

  /** The stream did what it is for: breaks before do not count any more. */
  progressed(): void {
    this.attempts = 0;
    this.brokenSince = undefined;
  }

  /** Milliseconds to wait before opening again; undefined gives up. */
  delayMs(error: MemstreamError): number | undefined {
    const now = performance.now();
    if (this.openSince !== undefined && now - this.openSince > this.retry.delayMaxMs) this.progressed();
    this.openSince = undefined;
    this.brokenSince ??= now;
    if (!isCut(error) || now - this.brokenSince > this.allowanceMs) return undefined;
    const ceiling = Math.min(this.retry.delayMaxMs, this.retry.delayMinMs * 2 ** Math.min(this.attempts, 16));
    this.attempts += 1;
    return Math.max(error.retryAfterMs ?? 0, ceiling * Math.random());
  }
}

/** Runs `attempt`, one connection of a stream, again after each break until it returns; throws the last break. */
export async function persist(attempt: () => Promise<void>, backoff: Backoff, end: AbortSignal): Promise<void> {
  for (;;) {
    try {
      await attempt();
      return;
    } catch (thrown) {
      const error = asError(thrown);
      const delay = end.aborted ? undefined : backoff.delayMs(error);
      if (delay === undefined) throw error;
      await sleep(delay, undefined, { signal: end }).catch(() => undefined); // an end is seen by the next attempt
      if (end.aborted) throw error;
    }
  }
}
