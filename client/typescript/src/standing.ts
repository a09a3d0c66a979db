/**
 * Standing queries: an answer that is kept current over any number of connections.
 *
 * The server sends the whole answer, then changes; a new connection starts with the whole answer again. The iterator
 * yields the difference between the current answer and the one it yielded before: a reconnect loses nothing, and a slow
 * reader gets fewer, larger changes.
 */
import type { Answer } from "./answer.js";
import { Changes } from "./changes.js";
import { asError, deadlineError, protocolViolationError } from "./errors.js";
import type { RecallDone, RecallQuery, Recollection, Recollections } from "./gen/memstream/v1/stream_service_pb.js";

/** Options of a standing query. */
export interface StandingOptions {
  /** Limits the wait for the first answer. Default: the client's. */
  readonly timeoutMs?: number | undefined;
  /** Ends the standing query: the loop over it throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** A change of a standing query's answer since the previous change; in the first, everything has entered. */
export interface AnswerChange {
  /** The whole current answer, best first. */
  readonly answer: Answer;
  /** The recollections that joined the answer. */
  readonly entered: readonly Recollection[];
  /** The recollections with another status, or of which the fragment has a new version: enhanced, promoted or edited. */
  readonly changed: readonly Recollection[];
  /**
   * The ids of the recollections that left the answer: others rank higher, or they were superseded, forgotten, merged or
   * erased.
   */
  readonly retracted: readonly string[];
}

/** The state of a standing query on its stream. */
export class StandingState {
  answer: Answer | undefined;
  error: Error | undefined;
  readonly changes = new Changes();

  private parts: Recollections[] = [];
  private known = new Map<string, Recollection>();

  constructor(readonly query: RecallQuery) {}

  /** Whether it waits for its first answer. */
  get isUnanswered(): boolean {
    return this.answer === undefined;
  }

  /** Prepares for resending, which returns the whole answer. */
  prepareResend(): void {
    this.parts = [];
    this.known.clear();
  }

  /** Adds a part of the answer, or of a change. */
  addPart(part: Recollections): void {
    this.parts.push(part);
  }

  /** Completes the answer, or a change. Throws PROTOCOL_VIOLATION if it ranks a fragment that was never sent. */
  completeAnswer(done: RecallDone): void {
    for (const one of this.parts.flatMap((part) => part.recollections)) this.known.set(idOf(one), one);
    this.parts = [];
    const missing = done.rankingIds.filter((id) => !this.known.has(id)).slice(0, 3);
    if (missing.length > 0) {
      throw protocolViolationError(`the server ranks fragments that it has not sent: ${missing.join(", ")}`);
    }
    const recollections = done.rankingIds
      .map((id) => this.known.get(id))
      .filter((one) => one !== undefined)
      .map((one, place) => ({ ...one, rank: place + 1 }));
    this.known = new Map(recollections.map((one) => [idOf(one), one]));
    this.answer = { recollections, workingMemory: [], done };
    this.changes.notify();
  }

  /** Ends the query with an error. */
  failQuery(error: Error): void {
    this.error = error;
    this.changes.notify();
  }
}

/**
 * A query whose answer is kept current, created by `RecallStream.subscribe`. Iterate over it once to send it and to get
 * the changes; leaving the loop ends it.
 */
export class StandingQuery implements AsyncIterable<AnswerChange> {
  private readonly endController = new AbortController();
  private started: Promise<void> | undefined;
  private delivered: Answer | undefined;

  /** Use `RecallStream.subscribe`. */
  constructor(
    private readonly standing: StandingState,
    private readonly options: StandingOptions & { readonly timeoutMs: number },
    private readonly sendQuery: (signal: AbortSignal) => Promise<void>,
    private readonly cancelQuery: () => void,
  ) {}

  /** The whole current answer; undefined before the first one. */
  get answer(): Answer | undefined {
    return this.standing.answer;
  }

  /** Ends the query, which no longer counts as in flight: the loop over it ends. */
  close(): void {
    this.endController.abort();
    this.cancelQuery();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<AnswerChange, void, undefined> {
    const { signal } = this.options;
    const ended = this.endController.signal;
    const stop = (): void => { this.close(); };
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      if (!ended.aborted) await (this.started ??= this.start());
      while (!ended.aborted) {
        const change = this.answer && answerChange(this.delivered, this.answer);
        if (change) {
          this.delivered = change.answer;
          yield change;
        } else if (this.standing.error) {
          throw this.standing.error;
        } else {
          await this.standing.changes.next(ended);
        }
      }
      signal?.throwIfAborted();
    } catch (thrown) {
      signal?.throwIfAborted();
      if (this.standing.error && thrown === this.standing.error) throw thrown;
      if (!ended.aborted) throw asError(thrown);
    } finally {
      signal?.removeEventListener("abort", stop);
      this.close();
    }
  }

  /** Sends the query, and waits for the first answer or the error that ended the query. */
  private async start(): Promise<void> {
    const { timeoutMs } = this.options;
    const limit = new AbortController();
    const stop = (): void => { limit.abort(this.endController.signal.reason); };
    const timer = setTimeout(() => { limit.abort(deadlineError(timeoutMs)); }, Math.min(timeoutMs, 2 ** 31 - 1));
    this.endController.signal.addEventListener("abort", stop, { once: true });
    try {
      await this.sendQuery(limit.signal);
      while (!this.answer && !this.standing.error) await this.standing.changes.next(limit.signal);
    } finally {
      clearTimeout(timer);
      this.endController.signal.removeEventListener("abort", stop);
    }
  }
}

/** Returns the change from one answer to the next; undefined if nothing that a reader would notice changed. */
function answerChange(before: Answer | undefined, now: Answer): AnswerChange | undefined {
  const beforeEtags = etags(before);
  const nowEtags = etags(now);
  const sameDegradation = before && Boolean(before.done.degraded) === Boolean(now.done.degraded);
  if (sameDegradation && sameVersions([...beforeEtags], [...nowEtags])) return undefined;
  return {
    answer: now,
    entered: now.recollections.filter((one) => !beforeEtags.has(idOf(one))),
    changed: now.recollections.filter((one) => {
      const etag = beforeEtags.get(idOf(one));
      return etag !== undefined && etag !== nowEtags.get(idOf(one));
    }),
    retracted: [...beforeEtags.keys()].filter((id) => !nowEtags.has(id)),
  };
}

function sameVersions(before: readonly [string, string][], now: readonly [string, string][]): boolean {
  return before.length === now.length && before.every(([id, etag], place) => {
    const [nowId, nowEtag] = now[place] ?? [];
    return id === nowId && etag === nowEtag;
  });
}

function etags(answer: Answer | undefined): Map<string, string> {
  return new Map(answer?.recollections.map((one) => [idOf(one), `${one.fragment?.etag ?? ""} ${one.status.toString()}`]));
}

function idOf(recollection: Recollection): string {
  return recollection.fragment?.id ?? "";
}
