/** Decides when to retry a call or reopen a broken stream, and when to give up. */
import { setTimeout as sleep } from "node:timers/promises";

import { Code } from "@connectrpc/connect";

import { asError, isCut } from "./errors.js";
import type { MemstreamError } from "./errors.js";
import { ErrorReason } from "./gen/memstream/v1/error_pb.js";

/**
 * How streams reconnect and unary calls are retried: exponential backoff with full jitter, at least the delay that the
 * server requests, until a limit has passed without progress. In milliseconds.
 */
export interface Retry {
  /**
   * Limits the retries of a unary call while the server is unavailable; 0 disables retries. Default 10 s. A call never
   * outlasts its own timeout.
   */
  readonly callsMs: number;
  /** Limits the first connection; it is short, so that a wrong address fails soon. Default 10 s. */
  readonly firstMs: number;
  /** Limits each reconnection; it leaves time to restart, upgrade or move a server. Default 2 min. */
  readonly laterMs: number;
  /** Upper bound of the first delay. Default 50 ms. */
  readonly delayMinMs: number;
  /** Upper bound of every delay. Default 5 s. */
  readonly delayMaxMs: number;
}

/** The defaults. */
export const RETRY: Retry = {
  callsMs: 10_000,
  firstMs: 10_000,
  laterMs: 120_000,
  delayMinMs: 50,
  delayMaxMs: 5_000,
};

/** Decides after each failure of one unary call, and after each break of one stream. */
export class Backoff {
  private allowanceMs: number;
  private attempts = 0;
  private brokenSince: number | undefined;
  private openSince: number | undefined;
  private wasOpen = false;

  constructor(private readonly retry: Retry) {
    this.allowanceMs = retry.firstMs;
  }

  /** Records that the stream is open; this counts as progress once it has been open for the longest delay. */
  markOpened(): void {
    this.allowanceMs = this.retry.laterMs;
    this.openSince = performance.now();
    this.wasOpen = true;
  }

  /** Records progress: earlier breaks no longer count. */
  markProgress(): void {
    this.attempts = 0;
    this.brokenSince = undefined;
  }

  /**
   * Whether to reopen a stream after `error`. UNAUTHENTICATED on an open stream means that its token expired: it is
   * reopened with a new one. UNAUTHENTICATED at the opening is final. So is a quota at the first opening: it may be
   * reached for as long as other streams are open.
   */
  shouldReopen(error: MemstreamError): boolean {
    if (error.reason === ErrorReason.QUOTA_EXCEEDED && !this.wasOpen) return false;
    return isCut(error) || (error.code === Code.Unauthenticated && this.openSince !== undefined);
  }

  /** Milliseconds to wait before the next attempt. */
  nextDelayMs(error: MemstreamError): number {
    const now = performance.now();
    if (this.openSince !== undefined && now - this.openSince > this.retry.delayMaxMs) this.markProgress();
    this.openSince = undefined;
    this.brokenSince ??= now;
    const ceiling = Math.min(this.retry.delayMaxMs, this.retry.delayMinMs * 2 ** Math.min(this.attempts, 16));
    this.attempts += 1;
    return Math.max(error.retryAfterMs ?? 0, ceiling * Math.random());
  }

  /** Whether the stream has been broken for longer than its limit. */
  get isExhausted(): boolean {
    return this.brokenSince !== undefined && performance.now() - this.brokenSince > this.allowanceMs;
  }
}

/**
 * Runs `attempt`, one connection of a stream, again after each break until it returns. Throws the last error if it is
 * final, or the reason of `end`.
 */
export async function repeatUntilDone(attempt: () => Promise<void>, backoff: Backoff, end: AbortSignal): Promise<void> {
  for (;;) {
    try {
      await attempt();
      return;
    } catch (thrown) {
      end.throwIfAborted();
      const error = asError(thrown);
      const reopen = backoff.shouldReopen(error);
      const delayMs = backoff.nextDelayMs(error);
      if (!reopen || backoff.isExhausted) throw error;
      await sleep(delayMs, undefined, { signal: end }).catch(() => { end.throwIfAborted(); });
    }
  }
}
