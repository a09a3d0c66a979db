/**
 * Standing queries: an answer that is kept as it is now, over any number of connections.
 *
 * The server tells the whole answer, and then what changes in it; a new connection begins with the whole answer again.
 * So what is handed out is not what was told but the difference between the answer now and the one handed out before:
 * nothing is lost by a break, and whoever reads slowly reads less.
 */
import { Changes } from "./changes.js";
import { asError, late, protocolViolation } from "./errors.js";
import type { RecallDone, RecallQuery, Recollection, Recollections } from "./gen/memstream/v1/stream_service_pb.js";
import type { Answer } from "./recall.js";

/** What is wanted of a standing query. */
export interface StandingOptions {
  /** Bounds the wait for the first answer. Default: the client's. */
  readonly timeoutMs?: number | undefined;
  /** Ends the standing query: the loop over it throws the signal's reason. */
  readonly signal?: AbortSignal | undefined;
}

/** What is new in the answer to a standing query since the change before; in the first, everything has entered. */
export interface AnswerChange {
  /** The whole answer as it is now, best first. */
  readonly answer: Answer;
  /** What came among the best. */
  readonly entered: readonly Recollection[];
  /** What was among them and is of another version: enhanced, promoted, edited. */
  readonly changed: readonly Recollection[];
  /** The ids of what is among them no more: others are better, or it was forgotten, merged or erased. */
  readonly retracted: readonly string[];
}

/** What a stream has been told of a standing query. */
export class Standing {
  answer: Answer | undefined;
  error: Error | undefined;
  readonly changes = new Changes();

  private parts: Recollections[] = [];
  private known = new Map<string, Recollection>();

  constructor(readonly query: RecallQuery) {}

  /** Whether the first answer is waited for. */
  get waiting(): boolean {
    return this.answer === undefined;
  }

  /** It is asked anew, and answered whole. */
  again(): void {
    this.parts = [];
    this.known.clear();
  }

  /** A part of the answer, or of a change. */
  continued(part: Recollections): void {
    this.parts.push(part);
  }

  /** The answer, or a change, is complete. Throws PROTOCOL_VIOLATION where it names what was never told. */
  answered(done: RecallDone): void {
    for (const one of this.parts.flatMap((part) => part.recollections)) this.known.set(idOf(one), one);
    this.parts = [];
    const recollections = done.rankingIds.map((id, place) => {
      const known = this.known.get(id);
      if (known === undefined) throw protocolViolation(`the server ranks what it has not told: ${id}`);
      return { ...known, rank: place + 1 };
    });
    this.known = new Map(recollections.map((one) => [idOf(one), one]));
    this.answer = { recollections, workingMemory: [], done };
    this.changes.notify();
  }

  /** It is answered no more. */
  failed(error: Error): void {
    this.error = error;
    this.changes.notify();
  }
}

/**
 * A query that goes on being answered; made by `RecallStream.subscribe`. Iterate over it once for the changes, which
 * asks it; leaving the loop gives it up.
 */
export class StandingQuery implements AsyncIterable<AnswerChange> {
  private readonly end = new AbortController();
  private begun: Promise<void> | undefined;
  private handed: Answer | undefined;

  /** Use `RecallStream.subscribe`. */
  constructor(
    private readonly standing: Standing,
    private readonly options: StandingOptions & { readonly timeoutMs: number },
    private readonly ask: (signal: AbortSignal) => Promise<void>,
    private readonly giveUp: () => void,
  ) {}

  /** The whole answer as it is now; undefined until there is one. */
  get answer(): Answer | undefined {
    return this.standing.answer;
  }

  /** Gives the query up, which frees its place: the loop over it ends. */
  close(): void {
    this.end.abort();
    this.giveUp();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<AnswerChange, void, undefined> {
    const { signal } = this.options;
    const ended = this.end.signal;
    const stop = (): void => { this.close(); };
    if (signal?.aborted) stop();
    signal?.addEventListener("abort", stop, { once: true });
    try {
      if (!ended.aborted) await (this.begun ??= this.begin());
      while (!ended.aborted) {
        const change = this.answer && difference(this.handed, this.answer);
        if (change) {
          this.handed = change.answer;
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

  /** Asks, and waits for the first answer or why there is none. */
  private async begin(): Promise<void> {
    const { timeoutMs } = this.options;
    const limit = new AbortController();
    const stop = (): void => { limit.abort(this.end.signal.reason); };
    const timer = setTimeout(() => { limit.abort(late(timeoutMs)); }, Math.min(timeoutMs, 2 ** 31 - 1));
    this.end.signal.addEventListener("abort", stop, { once: true });
    try {
      await this.ask(limit.signal);
      while (!this.answer && !this.standing.error) await this.standing.changes.next(limit.signal);
    } finally {
      clearTimeout(timer);
      this.end.signal.removeEventListener("abort", stop);
    }
  }
}

/** Undefined where nothing is new that one would want to be told. */
function difference(before: Answer | undefined, now: Answer): AnswerChange | undefined {
  const held = etags(before);
  const holds = etags(now);
  const equallySound = before && Boolean(before.done.degraded) === Boolean(now.done.degraded);
  if (equallySound && same([...held], [...holds])) return undefined;
  return {
    answer: now,
    entered: now.recollections.filter((one) => !held.has(idOf(one))),
    changed: now.recollections.filter((one) => held.has(idOf(one)) && held.get(idOf(one)) !== holds.get(idOf(one))),
    retracted: [...held.keys()].filter((id) => !holds.has(id)),
  };
}

function same(before: readonly [string, string][], now: readonly [string, string][]): boolean {
  return before.length === now.length && before.every(([id, etag], place) => {
    const [nowId, nowEtag] = now[place] ?? [];
    return id === nowId && etag === nowEtag;
  });
}

function etags(answer: Answer | undefined): Map<string, string> {
  return new Map(answer?.recollections.map((one) => [idOf(one), one.fragment?.etag ?? ""]));
}

function idOf(recollection: Recollection): string {
  return recollection.fragment?.id ?? "";
}
