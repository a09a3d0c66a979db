// Why a fragment is not in an answer: the same query with the largest limit, then the fragment alone.

import { call } from "./api.js";

/** Which stage removed a fragment, in words. */
export const STAGES = {
  filter: "the query's filter excludes it",
  candidates: "no search leg found it among its candidates",
  min_relevance: "its relevance is below the minimum",
  folded: "a recollection says the same",
  limit: "others rank higher: it is beyond the limit",
  budget: "it does not fit into the token budget",
  forgotten: "it is forgotten, so no recall finds it; it can be restored",
  superseded: "a newer fragment supersedes it",
  validity: "it is outside its validity",
};

/** Finds a fragment by id or external_id. `asOf` has the moment of a query, if it has one. */
export async function findFragment(memory, key, signal, asOf = {}) {
  try {
    return (await call("MemoryService/GetFragment", { ...memory, ...asOf, id: key }, signal)).fragment;
  } catch (error) {
    if (!["not_found", "invalid_argument"].includes(error.code)) throw error;
  }
  return (await call("MemoryService/GetFragment", { ...memory, ...asOf, externalId: key }, signal)).fragment;
}

/** The recollections of an answer, each followed by its reply. */
function shownIn(answer) {
  return (answer.recollections?.recollections ?? []).flatMap((each) => (each.companion ? [each, each.companion] : [each]));
}

/**
 * Finds a fragment by id, external_id, the end of its id, or a piece of its text; a forgotten one if no other matches.
 * `asOf` as above.
 */
export async function findByText(memory, key, signal, asOf) {
  try {
    return await findFragment(memory, key, signal, asOf);
  } catch (error) {
    if (!["not_found", "invalid_argument"].includes(error.code)) throw error;
  }
  for (const forgotten of [false, true]) {
    const { fragments: [found] = [] } = await call("MemoryService/ListFragments", { ...memory, ...asOf, text: key, forgotten, pageSize: 1 }, signal);
    if (found) return found;
  }
  throw new Error("No fragment has this id or external id, and none has this text: neither now nor among the forgotten ones.");
}

/**
 * Explains the place of a fragment in the answer to `query`. Returns { stage, rank, miss, foldedInto, recollection }:
 * `stage` is empty if the fragment is in the answer; `recollection` has its score, if it can be scored.
 */
export async function explainAbsence(memory, query, fragment, shown, limitMax, signal) {
  if (fragment.forgetTime) return { stage: "forgotten" };
  const ask = async (changes) => call("StreamService/RecallOnce",
    { ...memory, query: { ...query, explain: true, reinforce: false, omitWorkingMemory: true, ...changes } }, signal);
  const whole = await ask({ limit: limitMax, nearMisses: limitMax });
  const ranked = whole.recollections?.recollections ?? [];
  const found = ranked.find((each) => each.fragment.id === fragment.id);
  if (found) return { stage: found.rank > shown ? "limit" : "", rank: found.rank, recollection: found };
  const message = ranked.find((each) => each.companion?.fragment.id === fragment.id);
  if (message) return { stage: message.rank > shown ? "limit" : "", rank: message.rank, recollection: message.companion };
  const folding = ranked.find((each) => (each.foldedIds ?? []).includes(fragment.id));
  const miss = (whole.done?.nearMisses ?? []).find((each) => each.fragmentId === fragment.id);
  const alone = await askAlone(ask, fragment);
  const stage = folding ? "folded" : miss?.stage ?? await stageOf(ask, query, fragment);
  return { stage, miss, foldedInto: folding?.fragment.id, recollection: alone };
}

/** The millisecond of its observe_time as a filter. */
function moment(fragment) {
  const start = new Date(fragment.observeTime);
  return { observeTimeMin: start.toISOString(), observeTimeMax: new Date(start.getTime() + 1).toISOString() };
}

/** The stage of a fragment that is in neither list of the answer. */
async function stageOf(ask, query, fragment) {
  if (!(await passesFilter(ask, { ...query, truth: "TRUTH_ALL" }, fragment))) return "filter";
  if (await passesFilter(ask, query, fragment)) return "candidates";
  return fragment.supersededBy ? "superseded" : "validity";
}

async function askAlone(ask, fragment) {
  const answer = await ask({ filter: { ...moment(fragment), tiers: [fragment.tier] }, truth: "TRUTH_ALL", limit: 1_000, tokenBudget: 0, minRelevance: 0, fold: false, nearMisses: 0 });
  return shownIn(answer).find((each) => each.fragment.id === fragment.id);
}

async function passesFilter(ask, query, fragment) {
  const filter = query.filter ?? {};
  const within = moment(fragment);
  if (filter.observeTimeMin && new Date(filter.observeTimeMin) > new Date(fragment.observeTime)) return false;
  if (filter.observeTimeMax && new Date(filter.observeTimeMax) <= new Date(fragment.observeTime)) return false;
  const answer = await ask({ filter: { ...filter, ...within }, truth: query.truth, limit: 1_000, tokenBudget: 0, minRelevance: 0, fold: false, nearMisses: 0 });
  return shownIn(answer).some((each) => each.fragment.id === fragment.id);
}
