// The context desk: what an agent's model would be sent before a turn, what is left out and why, and the turn after it.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { clipped, field, given, h, show } from "../dom.js";
import { fragmentLink } from "../events.js";
import { count, enumName } from "../format.js";
import { memoryOf, pathOf, Scopes } from "../scopes.js";
import { rightsIn } from "../session.js";

const REASONS = {
  BUDGET: "no room in the budget",
  WEAK: "the memory's answer is weak",
  REPEATS: "the text says it already",
  IN_TAIL: "a message in the text says it",
  SUPERSEDED: "a later fragment supersedes it",
  UNAVAILABLE: "it is gone, or the caller may not recall it",
  CHANGED: "its text has changed",
  QUESTION_NOT_RECORDED: "the conversation does not continue with the first question",
  FAILED: "it could not be read in time",
};

export async function render({ place, signal, memory, query }) {
  const rights = await rightsIn(memory.namespace);
  if (!rights.has("recall")) {
    return show(place, h("p", { class: "empty" }, "Your key does not have the right to recall in this namespace."));
  }
  return new Desk(place, memory, signal).open(query);
}

class Desk {
  constructor(place, memory, signal) {
    Object.assign(this, { memory, signal });
    this.scopes = new Scopes(pathOf(memory), "Recall from further memories");
    this.status = h("p", { class: "away", role: "status" });
    this.answer = h("div", { class: "panes" });
    this.form = this.drawForm();
    show(place, this.form, this.status, this.answer);
  }

  drawForm() {
    const input = (name, more) => h("input", { name, type: "text", autocomplete: "off", spellcheck: "false", ...more });
    const form = h("form", { class: "query" }, field("Question", h("textarea", { name: "question", rows: 2, required: true })),
      field("Question of the next turn", h("textarea", { name: "next", rows: 1 })), this.scopes.root,
      h("div", { class: "fields" }, field("Blocks", input("blocks", { placeholder: "namespace/memory#name, …" })),
        field("Conversation", input("conversation", { placeholder: "namespace/name" })),
        field("Summary of what is cut", input("summary", { placeholder: "namespace/memory#name" })),
        field("Budget, tokens", input("budget", { type: "number", min: 1, placeholder: "4000" }))),
      h("div", { class: "bar" }, h("button", { type: "submit", class: "main" }, "Build the context"),
        h("label", { class: "check", title: "leave out memories and blocks that do not exist or that you may not recall" }, input("partial", { type: "checkbox" }), "partial"),
        h("span", { class: "quiet" }, "Nothing is reinforced or recorded.")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      remember(readForm(form));
      this.ask();
    });
    return form;
  }

  /** Takes the turns of an address and asks them; without any, the memory of the view is the first scope. */
  async open(query) {
    restoreForm(this.form, query);
    this.scopes.restore();
    if (query.get("question")) return this.ask();
    this.scopes.draw("memory", pathOf(this.memory), "");
    this.scopes.keep();
    return this.form.elements.question.focus({ preventScroll: true });
  }

  readRequest() {
    const { elements } = this.form;
    const request = { scopes: this.scopes.read(), question: elements.question.value, reinforce: false, partial: elements.partial.checked };
    const blocks = elements.blocks.value.split(",").map((one) => one.trim()).filter(Boolean);
    if (blocks.length) request.blocks = blocks;
    for (const name of ["conversation", "summary"]) {
      if (elements[name].value.trim()) request[name] = elements[name].value.trim();
    }
    if (elements.budget.value) request.budget = Number(elements.budget.value);
    return request;
  }

  async ask() {
    this.asked?.abort(); // later turns replace the first
    const asked = new AbortController();
    this.asked = asked;
    const signal = AbortSignal.any([this.signal, asked.signal]);
    show(this.status, "asking");
    show(this.answer);
    try {
      const request = this.readRequest();
      const first = await call("ContextService/Context", request, signal);
      this.answer.append(drawTurn("First turn", first, null));
      const question = this.form.elements.next.value.trim();
      if (question) {
        const next = await call("ContextService/Context", { ...request, question, after: first.position }, signal);
        this.answer.append(drawTurn("Next turn", next, first));
      }
      show(this.status, "done");
    } catch (error) {
      if (signal.aborted) return;
      show(this.status, "failed");
      this.answer.append(h("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

/** A turn; `before` is the one before it, or null. */
function drawTurn(title, turn, before) {
  const parts = turn.parts ?? [];
  const unchanged = Number(turn.unchangedTokens ?? 0);
  const holders = new Map((turn.citations ?? []).map((one) => [one.fragmentId, memoryOf(one.memory)]));
  let read = 0;
  let changed = false;
  const rows = parts.map((part, place) => {
    read += Number(part.tokens ?? 0);
    const turning = before !== null && !changed && read > unchanged;
    changed ||= turning;
    return drawPart(part, holders, turning ? sharedLength(part.text ?? "", before.parts?.[place]?.text ?? "") : null);
  });
  return h("section", { class: "pane", "aria-label": title }, h("h2", null, title),
    h("p", { class: "numbers summary" }, h("span", null, "tokens ", h("b", null, count(turn.tokens))),
      before && h("span", null, "as in the turn before ", h("b", null, `${count(unchanged)} of ${count(before.tokens)}`))),
    turn.weak && h("p", { class: "mark weak" }, "weak: the memories probably have nothing about this"),
    turn.degraded && h("p", { class: "mark warn" }, `degraded: ${turn.degraded}`),
    drawOmissions("Why the earlier text is not kept", turn.brokenBy, "broken"),
    h("ol", { class: "ranking" }, rows), drawOmissions("Left out", turn.leftOut, "left-out"));
}

/** How many characters two texts begin with in common; a pair of surrogates is not parted. */
function sharedLength(one, other) {
  let length = 0;
  while (length < one.length && one[length] === other[length]) length += 1;
  return /[\uD800-\uDBFF]/.test(one[length - 1] ?? "") ? length - 1 : length;
}

/**
 * `holders`: the memory of each fragment. `kept`: of the part from which the text differs from that of the turn before,
 * how many characters are the same; else null.
 */
function drawPart(part, holders, kept) {
  const text = part.text ?? "";
  const turning = kept !== null;
  return h("li", null, turning && h("p", { class: "turning" }, h("span", { class: "mark warn" }, "new from here")),
    h("p", { class: "quiet meta" }, h("b", null, enumName(part.kind, "CONTEXT_PART_KIND_")), ` · ${count(part.tokens)} tokens`, part.role && [" · ", given(part.role)],
      part.memory && [" · ", given(part.name ? `${part.memory}#${part.name}` : part.memory)],
      (part.fragmentIds ?? []).map((id) => holders.has(id) && [" ", fragmentLink(holders.get(id), id)])),
    h("div", null, kept > 0 && clipped(text.slice(0, kept), 1_000), turning ? h("mark", null, clipped(text.slice(kept), 1_000)) : clipped(text, 1_000)));
}

function drawOmissions(title, omissions = [], kind = "") {
  if (!omissions.length) return null;
  return h("section", { class: "box" }, h("h3", null, title), h("ul", { class: kind }, omissions.map((one) => {
    const holder = one.memory ? memoryOf(one.memory) : null;
    return h("li", null, enumName(one.kind, "CONTEXT_PART_KIND_"), one.memory && [" of ", given(one.name ? `${one.memory}#${one.name}` : one.memory)],
      Number(one.number ?? 0) > 0 && `, message ${count(one.number)}`, Number(one.count ?? 0) > 1 && ` (${count(one.count)})`,
      `: ${REASONS[one.reason.replace("CONTEXT_REASON_", "")] ?? enumName(one.reason, "CONTEXT_REASON_")}`,
      holder && (one.fragmentIds ?? []).map((id) => [" ", fragmentLink(holder, id)]));
  })));
}
