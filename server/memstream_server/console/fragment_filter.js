// The controls of a filter of fragments, and the filter that they say.

import { field, given, h, select } from "./dom.js";
import { timeInput, timeOf } from "./times.js";

export const TIERS = [["", "any"], ["TIER_SENSORY", "sensory"], ["TIER_SHORT_TERM", "short-term"], ["TIER_LONG_TERM", "long-term"]];
const KINDS = [["", "any"], ["FRAGMENT_KIND_OBSERVATION", "observation"], ["FRAGMENT_KIND_INSIGHT", "insight"]];

/** The controls, as fields of a form. */
export function filterFields() {
  const input = (name, type, more) => h("input", { name, type, autocomplete: "off", ...more });
  const share = { min: 0, max: 1, step: "any" };
  return [
    field("Session", input("session", "text")), field("Speaker", input("speaker", "text")),
    field("Tier", select("tier", TIERS)), field("Kind", select("kind", KINDS)),
    field("Perceived from", timeInput("from")), field("until", timeInput("to", true)),
    field("Importance from", input("importanceMin", "number", share)), field("to", input("importanceMax", "number", share)),
    field("Metadata", input("metadata", "text", { placeholder: "key=value, …" })),
    field("Where", input("where", "text", { placeholder: "metadata.n >= 3 and not speaker = \"Bob\"" })),
  ];
}

/** The filter of the controls. Throws an Error whose message says which is wrong. */
export function readFilter(elements) {
  const filter = {};
  const text = (name) => elements[name].value.trim();
  // A session of a link may have spaces at its ends, which a hand would not type.
  if (text("session")) filter.sessions = [elements.session.dataset.exact === elements.session.value ? elements.session.value : text("session")];
  if (text("speaker")) filter.speakers = [text("speaker")];
  if (elements.tier.value) filter.tiers = [elements.tier.value];
  if (elements.kind.value) filter.kinds = [elements.kind.value];
  if (text("from")) filter.observeTimeMin = timeOf(elements.from);
  if (text("to")) filter.observeTimeMax = timeOf(elements.to);
  if (elements.importanceMin.value) filter.importanceMin = Number(elements.importanceMin.value);
  if (elements.importanceMax.value) filter.importanceMax = Number(elements.importanceMax.value);
  if (text("metadata")) filter.metadata = text("metadata").split(",").map(condition);
  if (text("where")) filter.expression = text("where");
  return filter;
}

/** "paid=true" matches the text and the boolean, "count=3" the text and the numbers. */
function condition(pair) {
  const [, key, value] = pair.trim().match(/^([^=]+)=(.*)$/s) ?? [];
  if (key === undefined) throw new Error("A condition on metadata is written as key=value; a comma separates several.");
  return { key, values: readValues(value) };
}

/** What a typed value may mean, as values of metadata; the text first. */
export function readValues(value) {
  const values = [{ stringValue: value }];
  if (/^(true|false)$/.test(value)) values.push({ boolValue: value === "true" });
  if (/^-?\d{1,15}$/.test(value)) values.push({ intValue: value });
  if (/^-?\d+(\.\d+)?(e-?\d+)?$/i.test(value)) values.push({ doubleValue: Number(value) });
  return values;
}

const NAMES = { speakers: "speaker", sessions: "session", metadata: "metadata key" };

/** The names of a filter that the memory does not have: a filter by one of them finds nothing. */
export function drawUnmatched(unmatched = []) {
  if (!unmatched.length) return null;
  return h("p", null, h("span", { class: "mark warn" }, "unmatched"), " This memory has no ",
    unmatched.map(({ field: name, value }, place) => [place > 0 && ", no ", `${NAMES[name] ?? name} `, given(value)]), ".");
}
