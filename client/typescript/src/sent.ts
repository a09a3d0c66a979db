/** Sent: an observation that is not yet stored. */
import type { ObservationOutcome } from "./gen/memstream/v1/stream_service_pb.js";

/** A numbered observation that will be delivered. */
export class Sent {
  /**
   * Resolves with the revision that committed the observation's tier decision: recalls with it as `minRevision` see the
   * observation. Rejects with the server's rejection of this observation, or with the error that ended the stream before
   * it was stored. You need not await it.
   */
  readonly stored: Promise<bigint>;
  /** The outcome of a stored observation, if the stream was opened with `outcomes`. */
  outcome: ObservationOutcome | undefined;

  private done = false;
  private resolve!: (revision: bigint) => void;
  private reject!: (error: Error) => void;

  constructor(readonly sequence: bigint) {
    this.stored = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.stored.catch(() => undefined); // not awaited: not an unhandled rejection, because the stream counts it
  }

  /** Marks it as stored; called by the stream. Does not override a rejection. */
  markStored(revision: bigint): void {
    if (this.done) return;
    this.done = true;
    this.resolve(revision);
  }

  /** Marks it as failed; called by the stream. False if it was already stored or rejected. */
  markFailed(error: Error): boolean {
    if (this.done) return false;
    this.done = true;
    this.reject(error);
    return true;
  }
}
