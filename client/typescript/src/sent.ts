import type { ObservationOutcome } from "./gen/memstream/v1/stream_service_pb.js";

/** An observation that was numbered and will be delivered. */
export class Sent {
  /**
   * Its tier decision is committed; resolves with the revision that did it: recalls with it as `minRevision` see it.
   * Rejects with the server's refusal of this one observation, or what ended the stream before. Need not be awaited.
   */
  readonly stored: Promise<bigint>;
  /** What became of it once it is stored, if the stream was opened with `outcomes`. */
  outcome: ObservationOutcome | undefined;

  private done = false;
  private resolve!: (revision: bigint) => void;
  private reject!: (error: Error) => void;

  constructor(readonly sequence: bigint) {
    this.stored = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.stored.catch(() => undefined); // a refusal that nobody asks about is no defect: the stream counts it
  }

  /** Called by the stream. A refusal stands. */
  store(revision: bigint): void {
    if (this.done) return;
    this.done = true;
    this.resolve(revision);
  }

  /** Called by the stream; false when its fate was known. */
  refuse(error: Error): boolean {
    if (this.done) return false;
    this.done = true;
    this.reject(error);
    return true;
  }
}
