/** Waiting for a change, and for an abort signal. */
/** Notifies waiters of a change. */
export class Changes {
  private waiting = new Set<() => void>();

  /** Wakes all waiters. */
  notify(): void {
    const woken = this.waiting;
    this.waiting = new Set();
    for (const wake of woken) wake();
  }

  /** Resolves at the next change; rejects with the reason of the signal when it is aborted. */
  next(signal?: AbortSignal): Promise<void> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) {
        reject(signal.reason as Error);
        return;
      }
      const wake = (): void => {
        signal?.removeEventListener("abort", stop);
        resolve();
      };
      const stop = (): void => {
        this.waiting.delete(wake);
        reject(signal?.reason as Error);
      };
      signal?.addEventListener("abort", stop, { once: true });
      this.waiting.add(wake);
    });
  }
}

/** Resolves like `given`; rejects with the reason of the signal if it is aborted first. */
export async function raceSignal<T>(given: T | Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (signal === undefined) return given;
  signal.throwIfAborted();
  let stop!: () => void;
  const aborted = new Promise<never>((_, reject) => {
    stop = () => { reject(signal.reason as Error); };
    signal.addEventListener("abort", stop, { once: true });
  });
  try {
    return await Promise.race([given, aborted]);
  } finally {
    signal.removeEventListener("abort", stop);
  }
}
