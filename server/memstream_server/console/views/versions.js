// The earlier versions of a fragment: what each change replaced, as a difference, and how to bring one back.

import { action, clipped, given, h, visible } from "../dom.js";
import { differenceOf } from "../difference.js";
import { count, decimal, enumName, metadataValue, textOf, time } from "../format.js";

const SAME_MAX = 240;
const TAGS = { removed: "del", added: "ins", same: "span" };

/** The section of the versions. `restore(version)` brings one back; null if the caller may not. */
export function drawVersions({ fragment, versions = [] }, restore) {
  const entries = versions.map((one, place) => {
    const after = place ? versions[place - 1].fragment : fragment;
    return h("li", { class: "box", "data-version": one.version },
      h("div", { class: "bar" }, h("b", null, time(one.replaceTime)), ` ${enumName(one.replacedBy, "EVENT_TYPE_")}`,
        one.principal && [" by ", given(one.principal)], h("span", { class: "quiet" }, `version ${count(one.version)}`),
        restore && action("Restore this version", () => restore(one.version))),
      drawDifference(textOf(one.fragment), textOf(after)), drawChanges(one.fragment, after),
      h("details", null, h("summary", null, "old text"), clipped(textOf(one.fragment), 4_000)),
      h("details", null, h("summary", null, "new text"), clipped(textOf(after), 4_000)));
  });
  return h("section", { class: "versions" }, h("h2", null, `Versions (${count(versions.length)})`),
    versions.length ? h("ol", null, entries) : h("p", { class: "empty" }, "Nothing was changed, or the policy keeps no versions (history.versions)."));
}

/** Both texts as one: what was removed is struck, what was added is underlined, long equal parts are cut. */
export function drawDifference(before, after) {
  if (before === after) return h("p", { class: "quiet" }, "the same text");
  const parts = differenceOf(before, after);
  return h("bdi", { class: "content difference", dir: "auto" }, parts.map(({ kind, text }) => {
    const words = { removed: "removed: ", added: "added: " }[kind];
    return h(TAGS[kind], null, words && h("span", { class: "away" }, words), visible(kind === "same" ? shortened(text) : text));
  }));
}

function shortened(text) {
  const all = Array.from(text);
  return all.length <= SAME_MAX ? text : `${all.slice(0, SAME_MAX / 3).join("")} … ${all.slice(-SAME_MAX / 3).join("")}`;
}

/** The fields that a change replaced besides the text. */
function drawChanges(before, after) {
  const metadata = ({ metadata: pairs = {} }) => Object.keys(pairs).sort().map((name) => `${name}=${metadataValue(pairs[name])}`).join(", ");
  const pairs = [
    ["speaker", before.speaker ?? "", after.speaker ?? ""],
    ["role", before.role ?? "", after.role ?? ""],
    ["session", before.session ?? "", after.session ?? ""],
    ["importance", decimal(before.importance), decimal(after.importance)],
    ["perceived", before.observeTime ?? "", after.observeTime ?? ""],
    ["metadata", metadata(before), metadata(after)],
  ].filter(([, old, young]) => old !== young);
  return pairs.map(([name, old, young]) => h("p", { class: "quiet" }, `${name}: `, given(old || "none"), " → ", given(young || "none")));
}
