// Events as sentences: what happened to a fragment, and why.

import { h } from "./dom.js";
import { count, decimal, enumName, link, shortId, tierName, time } from "./format.js";

const REASONS = {
  EVENT_REASON_BELOW_THRESHOLD: "its importance is below the threshold",
  EVENT_REASON_NO_NEXT_TIER: "the memory's kind has no next tier",
  EVENT_REASON_CAPACITY: "the tier or the memory was full",
  EVENT_REASON_CLEARED: "the tier was cleared",
  EVENT_REASON_EXPIRED: "it expired",
  EVENT_REASON_RETENTION: "its strength fell below the policy's minimum",
  EVENT_REASON_REQUESTED: "a client requested it",
};

// What a type means, where no other field says why.
const MEANINGS = {
  EVENT_TYPE_OVERFLOWED: "the full tier must give up its weakest",
  EVENT_TYPE_UPDATED: "on request",
  EVENT_TYPE_RESTORED: "on request",
  EVENT_TYPE_UNVECTORED: "the embedding model refused it",
  EVENT_TYPE_VECTORED: "its missing vector was filled in",
  EVENT_TYPE_RATED: "its missing importance was filled in",
  EVENT_TYPE_IMPORTED: "from an export",
  EVENT_TYPE_SUPERSEDED: "it is no longer current",
  EVENT_TYPE_SUPERSESSION_UNDONE: "it is current again",
};

/** Why two fragments are suspected, in words. */
export const CONFLICT_REASONS = {
  twins: "they share many words",
  number: "they differ in a number",
  date: "they differ in a date",
  name: "they differ in a name",
  place: "they differ in a place",
  polarity: "one negates the other",
  change: "the newer one announces a change",
};

const DECISIONS = {
  newer: "this one is true, and supersedes it",
  older: "the other one is true, and supersedes this one",
  both: "both are true",
  neither: "neither: the suspicion ends",
};

/** The name of an event's type, for instance "promoted". */
export const eventName = (event) => enumName(event.type, "EVENT_TYPE_");

/** A link to a fragment of the memory. */
export function fragmentLink(memory, id) {
  return h("a", { class: "id", href: link("m", memory.namespace, memory.memory, "fragment", id), title: id }, shortId(id));
}

/** The reason of a step as nodes: who took part, which numbers decided. */
export function reasonOf(event, memory) {
  const parts = [];
  if (event.otherId) parts.push([ROLE_OF_OTHER[event.type] ?? "with ", fragmentLink(memory, event.otherId)]);
  if (MEANINGS[event.type]) parts.push(MEANINGS[event.type]);
  if (event.conflictReason) parts.push(CONFLICT_REASONS[event.conflictReason] ?? event.conflictReason);
  if (event.conflictDecision) parts.push(`decided: ${DECISIONS[event.conflictDecision] ?? event.conflictDecision}`);
  if (event.receiptId) parts.push(`receipt ${event.receiptId}`);
  if (Number(event.version ?? 0)) parts.push(`version ${count(event.version)} was restored`);
  if (event.reason) parts.push(REASONS[event.reason] ?? enumName(event.reason, "EVENT_REASON_"));
  if (event.cosine !== undefined) parts.push(`cosine ${decimal(event.cosine)}`);
  if (event.draw !== undefined) parts.push(`draw ${decimal(event.draw)}`);
  if (event.importance !== undefined) parts.push(`importance ${decimal(event.importance)}`);
  const sources = event.sources ?? [];
  if (sources.length) parts.push([`from ${count(sources.length)} source${sources.length > 1 ? "s" : ""}`]);
  if (event.modelUse) {
    const { purpose, model, requests, promptTokens, completionTokens } = event.modelUse;
    parts.push(`${model} for ${purpose}: ${count(requests)} requests, ${count(promptTokens)} + ${count(completionTokens)} tokens`);
  }
  return parts.map((part, place) => [place ? ", " : "", part]);
}

const ROLE_OF_OTHER = {
  EVENT_TYPE_ENHANCED: "by ",
  EVENT_TYPE_WEAKENED: "lost the enhancements of ",
  EVENT_TYPE_REPEATED: "by ",
  EVENT_TYPE_ECHOED: "by ",
  EVENT_TYPE_MERGED: "into ",
  EVENT_TYPE_SUPERSEDED: "by ",
  EVENT_TYPE_SUPERSESSION_UNDONE: "no longer by ",
  EVENT_TYPE_CONFLICT_SUSPECTED: "may contradict ",
  EVENT_TYPE_CONFLICT_RESOLVED: "against ",
  EVENT_TYPE_CONFLICT_ENDED: "no longer compared with ",
};

/** Where a fragment moved: "sensory → short-term". */
export function moveOf(event) {
  const from = event.fromTier ? tierName(event.fromTier) : "";
  const to = event.toTier ? tierName(event.toTier) : "";
  if (from && to && from !== to) return `${from} → ${to}`;
  return to || from;
}

/** A row of a list of events. */
export function eventRow(event, memory) {
  const name = eventName(event);
  return h("tr", { "data-type": name, "data-fragment": event.fragmentId }, h("td", null, time(event.time, false)),
    h("td", { class: "event" }, name), h("td", null, event.fragmentId && fragmentLink(memory, event.fragmentId)),
    h("td", null, moveOf(event)), h("td", { class: "reason" }, reasonOf(event, memory)),
    h("td", { class: "number" }, count(revisionOf(event))));
}

/** The revision that an event belongs to; a cursor within it names the one before. */
export function revisionOf(event) {
  const { revision, ordinal } = event.cursor ?? {};
  return Number(revision ?? 0) + (Number(ordinal ?? 0) > 0 ? 1 : 0);
}

export const EVENT_HEADS = ["Time", "Event", "Fragment", "Tier", "Reason", ["Revision", "number"]];
