/** When to make a call or open a broken stream again, and when to give up. */
import { setTimeout as sleep } from "node:timers/promises";

import { Code } from "@connectrpc/connect";

import { asError, isCut } from "./errors.js";
import type { MemstreamError } from "./errors.js";

/**
 * How streams reconnect and unary calls are repeated: full jitter up to a doubling delay, or what the server asks for
 * where that is longer, until so long has passed without progress. In ms.
 */
export interface Retry {
  /**
   * Bounds the repeats of a unary call while the server is unavailable; 0 repeats none. Default 10 s. A call never
   * outlasts its own time limit.
   */
  readonly callsMs: number;
  /** Bounds the first opening: a wrong address is to be told soon. Default 10 s. */
  readonly firstMs: number;
  /** Bounds every reconnection: a server is restarted, upgraded or moved meanwhile. Default 2 min. */
  readonly laterMs: number;
  /** The bound of the first delay. Default 50 ms. */
  readonly delayMinMs: number;
  /** The bound of every delay. Default 5 s. */
  readonly delayMaxMs: number;
}

export const RETRY: Retry = {
  callsMs: 10_000,
  firstMs: 10_000,
  laterMs: 120_000,
  delayMinMs: 50,
  delayMaxMs: 5_000,
};

/** Decides after each break of one stream, and after each failure of one unary call. */
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

  /**
   * Whether a stream that ended so is to be opened again. One that was open and is then ended as UNAUTHENTICATED is: with
   * the token of now. To be refused so at the opening is final.
   */
  reopens(error: MemstreamError): boolean {
    return isCut(error) || (error.code === Code.Unauthenticated && this.openSince !== undefined);
  }

  /** Milliseconds to wait after a break before the next attempt. */
  waitMs(error: MemstreamError): number {
    const now = performance.now();
    if (this.openSince !== undefined && now - this.openSince > this.retry.delayMaxMs) this.progressed();
    this.openSince = undefined;
    this.brokenSince ??= now;
    const ceiling = Math.min(this.retry.delayMaxMs, this.retry.delayMinMs * 2 ** Math.min(this.attempts, 16));
    this.attempts += 1;
    return Math.max(error.retryAfterMs ?? 0, ceiling * Math.random());
  }

  /** Whether the stream has been broken for longer than is allowed. */
  get spent(): boolean {
    return this.brokenSince !== undefined && performance.now() - this.brokenSince > this.allowanceMs;
  }
}

/** Runs `attempt`, one connection of a stream, again after each break until it returns; throws the last break, or the reason of `end`. */
export async function persist(attempt: () => Promise<void>, backoff: Backoff, end: AbortSignal): Promise<void> {
  for (;;) {
    try {
      await attempt();
      return;
    } catch (thrown) {
      end.throwIfAborted();
      const error = asError(thrown);
      const reopens = backoff.reopens(error);
      const waitMs = backoff.waitMs(error);
      if (!reopens || backoff.spent) throw error;
      await sleep(waitMs, undefined, { signal: end }).catch(() => { end.throwIfAborted(); });
    }
  }
}
