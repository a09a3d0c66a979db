// A score as a bar: one segment for each part, so that the bar is the sum.

import { h, labelCells } from "./dom.js";
import { decimal } from "./format.js";

const KNOWN = ["lexical", "dense", "context", "reply", "speaker", "recency", "importance", "rerank", "time", "chain", "answer"];
const TOLERANCE = 1e-6;

/** A score's parts, the largest first; each sum is checked. */
export function partsOf(recollection) {
  const parts = (recollection.explanation?.parts ?? []).map((part) => ({
    name: part.name,
    value: Number(part.value ?? 0),
    weight: Number(part.weight ?? 0),
    contribution: Number(part.contribution ?? 0),
    details: part.details ?? {},
  }));
  return parts.sort((one, other) => Math.abs(other.contribution) - Math.abs(one.contribution));
}

/** Whether the contributions sum to the score. */
export function sumsUp(recollection, parts) {
  const sum = parts.reduce((total, part) => total + part.contribution, 0);
  return Math.abs(sum - Number(recollection.score ?? 0)) < TOLERANCE;
}

/** The length of the longest bar of an answer: bars of one scale can be compared. */
export function scaleOf(recollections) {
  const lengths = recollections.map((each) => partsOf(each).reduce((sum, part) => sum + Math.max(0, part.contribution), 0));
  return Math.max(1e-9, ...lengths);
}

function colour(name) {
  const known = KNOWN.indexOf(name);
  if (known >= 0) return `part-${known}`;
  let sum = 0;
  for (const char of name) sum += char.codePointAt(0);
  return `part-${sum % KNOWN.length}`;
}

/** The bar. Parts that lower the score are hatched, after the others. */
export function bar(recollection, scale) {
  const parts = partsOf(recollection).filter((part) => part.contribution !== 0);
  parts.sort((one, other) => (other.contribution > 0) - (one.contribution > 0));
  const words = parts.map((part) => `${part.name} ${decimal(part.contribution)}`).join(", ");
  const segments = parts.map((part) => {
    const segment = h("span", { class: `${colour(part.name)}${part.contribution < 0 ? " minus" : ""}`, title: `${part.name} ${decimal(part.contribution)}` });
    segment.style.width = `${(100 * Math.abs(part.contribution)) / scale}%`;
    return segment;
  });
  return h("div", { class: "score-bar", role: "img", "aria-label": `score ${decimal(recollection.score)}: ${words}` }, segments);
}

/** The parts as a table whose last row is the sum. */
export function partsTable(recollection) {
  const parts = partsOf(recollection);
  const rows = parts.map((part) => h("tr", null,
    h("th", { scope: "row" }, h("span", { class: `swatch ${colour(part.name)}` }), part.name),
    h("td", { class: "number" }, decimal(part.value)), h("td", { class: "number" }, `× ${decimal(part.weight)}`),
    h("td", { class: "number" }, decimal(part.contribution)),
    h("td", { class: "quiet" }, Object.entries(part.details).map(([name, value]) => `${name} ${decimal(value)}`).join(", "))));
  const good = sumsUp(recollection, parts);
  const sum = h("tr", { class: "sum" }, h("th", { scope: "row" }, "score"), h("td"), h("td"),
    h("td", { class: "number" }, decimal(recollection.score)),
    h("td", { class: good ? "quiet" : "problem" }, good ? recollection.explanation?.formula : "the parts do not sum to the score"));
  const heads = [["part", ""], ["value", "number"], ["weight", "number"], ["contribution", "number"], ["inputs", ""]];
  const made = h("table", { class: "parts" }, h("caption", { class: "away" }, "Parts of the score"),
    h("thead", null, h("tr", null, heads.map(([head, cls]) => h("th", { scope: "col", class: cls }, head)))), h("tbody", null, rows, sum));
  return labelCells(made, heads.map(([head]) => head));
}

/** Which colour is which part. */
export function legend(recollections) {
  const names = new Set(recollections.flatMap((each) => partsOf(each).filter((part) => part.contribution !== 0).map((part) => part.name)));
  return h("p", { class: "legend" }, [...names].map((name) => h("span", null, h("span", { class: `swatch ${colour(name)}` }), name)));
}
