// The fragments of a memory in order of receipt, under their sessions, a page at a time.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { clipped, given, h, hiddenMark, show } from "../dom.js";
import { fragmentLink } from "../events.js";
import { drawUnmatched, filterFields, readFilter } from "../fragment_filter.js";
import { count, decimal, enumName, textOf, tierName, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { sessionLink } from "./sessions.js";

export async function render({ place, signal, memory, query }) {
  const form = h("form", { class: "filters", role: "search" }, filterFields(),
    h("label", { class: "check" }, h("input", { type: "checkbox", name: "forgotten" }), "forgotten ones"), h("button", { type: "submit" }, "Show"));
  restoreForm(form, query);
  form.elements.session.dataset.exact = query.get("session") ?? "";
  const rows = h("div");
  show(place, form, rows);
  const open = paged(rows, async (pageToken) => {
    const request = { ...memory, filter: readFilter(form.elements), forgotten: form.elements.forgotten.checked, pageSize: PAGE_SIZE, pageToken };
    const answer = await call("MemoryService/ListFragments", request, signal);
    return { rows: answer.fragments ?? [], next: answer.nextPageToken, unmatched: answer.unmatched };
  }, (fragments, { unmatched }) => [drawUnmatched(unmatched), fragments.length ? bySession(fragments, memory) : h("p", { class: "empty" }, "No fragment matches.")]);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    remember({ ...readForm(form), page: null });
    open().catch((error) => { if (!signal.aborted) show(rows, h("p", { class: "problem", role: "alert" }, error.message)); });
  });
  return open();
}

/** Runs of one session, each under a heading. */
function bySession(fragments, memory) {
  const runs = [];
  for (const fragment of fragments) {
    const session = fragment.session ?? "";
    if (runs.at(-1)?.session !== session) runs.push({ session, fragments: [] });
    runs.at(-1).fragments.push(fragment);
  }
  return [sessionsOf(runs, memory), ...runs.map((run) => h("section", { class: "session" },
    h("h2", null, run.session ? h("a", { href: sessionLink(memory, run.session), title: "This session alone" }, given(run.session)) : "no session", " ", h("span", { class: "quiet" }, time(run.fragments[0].observeTime))),
    h("ol", { class: "timeline" }, run.fragments.map((fragment) => entry(fragment, memory)))))];
}

/** The sessions of a page as links, with their fragments; the view Sessions lists all. */
function sessionsOf(runs, memory) {
  const sessions = new Map();
  for (const { session, fragments } of runs) if (session) sessions.set(session, (sessions.get(session) ?? 0) + fragments.length);
  if (sessions.size < 2) return null;
  return h("nav", { class: "box", "aria-label": "Sessions of this page" }, h("h2", null, "Sessions of this page"),
    h("ul", { class: "sessions" }, [...sessions].map(([session, fragments]) => h("li", null,
      h("a", { href: sessionLink(memory, session) }, given(session)), " ", h("span", { class: "quiet number" }, `(${count(fragments)})`)))));
}

function entry(fragment, memory) {
  const enhanced = Number(fragment.enhancementCount ?? 0);
  return h("li", null,
    h("div", { class: "when" }, time(fragment.observeTime, false), h("br"), fragmentLink(memory, fragment.id)),
    h("div", null, fragment.speaker && h("b", null, given(fragment.speaker), " "), clipped(textOf(fragment)),
      h("p", { class: "quiet meta" }, tierName(fragment.tier), " ", hiddenMark(fragment),
        fragment.kind === "FRAGMENT_KIND_INSIGHT" && h("span", { class: "mark" }, enumName(fragment.kind, "FRAGMENT_KIND_")),
        fragment.pinned && h("span", { class: "mark" }, "pinned"), fragment.supersededBy && h("span", { class: "mark" }, "superseded"),
        fragment.forgetTime && h("span", { class: "mark warn" }, "forgotten"),
        ` importance ${decimal(fragment.importance, 2)}`, enhanced > 0 && ` enhanced ${count(enhanced)}×`,
        fragment.duplicateCount && ` repeated ${count(fragment.duplicateCount)}×`,
        fragment.accessCount && ` recalled ${count(fragment.accessCount)}×`)));
}
