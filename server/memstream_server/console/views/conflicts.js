// Suspicions: pairs of fragments that may not be true together, and the decision about each.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { action, clipped, facts, field, given, h, select, show } from "../dom.js";
import { CONFLICT_REASONS, fragmentLink } from "../events.js";
import { enumName, textOf, tierName, time } from "../format.js";
import { paged } from "../paging.js";
import { readFragments } from "../related.js";
import { rightsIn } from "../session.js";

const ROWS = 20;
const NOTE_CHARACTERS_MAX = 1_000;
const LISTS = [["open", "open"], ["decided", "decided"]];
const DECISIONS = [
  ["NEWER", "The newer is true", "it supersedes the older one"],
  ["OLDER", "The older is true", "it supersedes the newer one"],
  ["BOTH", "Both are true", "the suspicion ends"],
  ["NEITHER", "Neither", "the suspicion ends; it was of no use"],
];

export async function render({ place, signal, memory, query }) {
  const rights = await rightsIn(memory.namespace);
  const list = select("list", LISTS, "open");
  const form = h("form", { class: "filters" }, field("Suspicions", list));
  restoreForm(form, query);
  const rows = h("div");
  show(place, form,
    h("p", { class: "quiet" }, "Statements of one speaker that share many words, suspected for the LLM to decide, or decided by somebody."),
    !rights.has("write") && h("p", { class: "quiet" }, "Your key does not have the right to decide (write)."), rows);
  const open = paged(rows, async (pageToken) => {
    const request = { ...memory, decided: list.value === "decided", pageSize: ROWS, pageToken };
    const { conflicts = [], nextPageToken } = await call("MemoryService/ListConflicts", request, signal);
    const texts = await readFragments(memory, conflicts.flatMap(({ suspicion }) => [suspicion.newerId, suspicion.olderId]), signal);
    const empty = conflicts.length ? null : await explainEmpty(memory, request.decided, signal);
    return { rows: conflicts, texts, empty, next: nextPageToken };
  }, (conflicts, { texts, empty }) => empty ?? h("ol", { class: "conflicts", "data-list": list.value }, conflicts.map((record) =>
    new Pair(memory, record, texts, rights.has("write"), signal).root)), ROWS);
  list.addEventListener("change", () => {
    remember({ ...readForm(form), page: null });
    open().catch((error) => { if (!signal.aborted) show(rows, h("p", { class: "problem", role: "alert" }, error.message)); });
  });
  return open();
}

/** Why the list is empty. */
async function explainEmpty(memory, decided, signal) {
  if (decided) return h("p", { class: "empty" }, "No suspicion has been decided.");
  const { policy = {} } = (await call("MemoryService/GetMemory", memory, signal)).memory;
  return h("p", { class: "empty" }, policy.conflicts?.suspect === false
    ? "The policy of this memory suspects nothing: conflicts.suspect is off."
    : policy.conflicts?.askLlm ? "No open suspicion. The server makes one when an observation shares many words with an earlier statement of the same speaker."
      : "No open suspicion. Suspicions are recorded with conflicts.ask_llm; without it, recall marks earlier statements, and you decide there.");
}

/** Two fragments next to each other, the older one first, and the buttons that decide. */
class Pair {
  constructor(memory, record, texts, mayDecide, signal) {
    Object.assign(this, { memory, record, texts, mayDecide, signal });
    this.root = h("li", { class: "box conflict", "data-newer": record.suspicion.newerId, "data-older": record.suspicion.olderId });
    this.draw();
  }

  draw() {
    const { suspicion, decision, note, decideTime } = this.record;
    const decided = DECISIONS.find(([name]) => decision === `CONFLICT_DECISION_${name}`);
    show(this.root,
      h("p", { class: "meta" }, h("span", { class: "mark warn" }, visibleReason(suspicion.reason)),
        h("span", { class: "quiet" }, "suspected ", time(suspicion.createTime)),
        decided && [" ", h("span", { class: "mark good" }, `decided: ${enumName(decided[0], "")}`),
          h("span", { class: "quiet" }, `${decided[2]} · `, time(decideTime))]),
      note && h("p", null, "Note: ", given(note, "content")),
      h("div", { class: "columns" }, this.drawSide("Older", suspicion.olderId), this.drawSide("Newer", suspicion.newerId)),
      this.mayDecide && (decided ? h("details", null, h("summary", null, "decide again"), this.drawForm()) : this.drawForm()));
  }

  drawSide(title, id) {
    const fragment = this.texts.get(id);
    return h("section", { class: "side" }, h("h2", null, title, " ", fragmentLink(this.memory, id)),
      fragment ? [h("div", { class: "body" }, clipped(textOf(fragment), 1_000)), facts([
        ["speaker", fragment.speaker && given(fragment.speaker)],
        ["perceived", time(fragment.observeTime)],
        ["received", time(fragment.createTime)],
        ["tier", tierName(fragment.tier)],
        ["superseded by", fragment.supersededBy && fragmentLink(this.memory, fragment.supersededBy)],
      ])] : h("p", { class: "empty" }, "gone or forgotten"));
  }

  drawForm() {
    const note = h("input", { type: "text", name: "note", maxlength: NOTE_CHARACTERS_MAX, autocomplete: "off" });
    return h("div", { class: "bar decide" }, field("Note", note), DECISIONS.map(([name, label, effect]) => {
      const button = action(label, () => this.decide(name, note.value.trim()));
      button.setAttribute("title", effect);
      return button;
    }));
  }

  async decide(name, note) {
    const { newerId, olderId } = this.record.suspicion;
    const request = { ...this.memory, newerId, olderId, decision: `CONFLICT_DECISION_${name}`, note, requestId: crypto.randomUUID?.() };
    this.record = (await call("MemoryService/ResolveConflict", request, this.signal)).conflict;
    this.texts = await readFragments(this.memory, [newerId, olderId], this.signal);
    this.draw();
    this.root.querySelector("a").focus({ preventScroll: true });
    this.root.dispatchEvent(new CustomEvent("conflicts", { bubbles: true }));
  }
}

const visibleReason = (reason) => CONFLICT_REASONS[reason] ?? `suspected: ${reason}`;

/** The number of open suspicions, "100+" if there are more than one page; empty for none. */
export async function countOpen(memory, signal) {
  const { conflicts = [], nextPageToken } = await call("MemoryService/ListConflicts", { ...memory, pageSize: 100 }, signal);
  return conflicts.length ? `${conflicts.length}${nextPageToken ? "+" : ""}` : "";
}
