/** The answer to a query, joined from its parts. */
import type { Fragment } from "./gen/memstream/v1/fragment_pb.js";
import type { RecallDone, Recollection, Recollections } from "./gen/memstream/v1/stream_service_pb.js";

/** The whole answer to a query. */
export interface Answer {
  /** Ranked, best first. */
  readonly recollections: readonly Recollection[];
  /** The short-term fragments in order, including those that are also ranked. */
  readonly workingMemory: readonly Fragment[];
  /** The revision that was read, what was considered, and the duration. */
  readonly done: RecallDone;
}

/** Joins the parts of an answer. */
export function toAnswer(parts: readonly Recollections[], done: RecallDone): Answer {
  const recollections = parts.flatMap((part) => part.recollections);
  const byId = new Map<string, Fragment>();
  for (const { fragment } of recollections) if (fragment) byId.set(fragment.id, fragment);
  for (const fragment of parts.flatMap((part) => part.workingMemory)) byId.set(fragment.id, fragment);
  const workingMemory = parts
    .flatMap((part) => part.workingMemoryIds)
    .map((id) => byId.get(id))
    .filter((fragment) => fragment !== undefined);
  return { recollections, workingMemory, done };
}
