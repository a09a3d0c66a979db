// The sessions of a memory, the one with the latest observation first, a page at a time.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { field, given, h, show, table } from "../dom.js";
import { count, link, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { timeInput, timeOf } from "../times.js";

const HEADS = ["Session", "First observation", "Last observation", ["Fragments", "number"], "Speakers"];

export async function render({ place, signal, memory, query }) {
  const prefix = h("input", { name: "prefix", type: "search", autocomplete: "off" });
  const [from, to] = [timeInput("from"), timeInput("to", true)];
  const form = h("form", { class: "filters", role: "search" }, field("Name begins with", prefix),
    field("Active from", from), field("until", to), h("button", { type: "submit" }, "Show"));
  restoreForm(form, query);
  const rows = h("div");
  show(place, form, rows);
  const open = paged(rows, async (pageToken) => {
    const request = { ...memory, sessionPrefix: prefix.value, pageSize: PAGE_SIZE, pageToken };
    if (from.value.trim()) request.observeTimeMin = timeOf(from);
    if (to.value.trim()) request.observeTimeMax = timeOf(to);
    const answer = await call("MemoryService/ListSessions", request, signal);
    return { rows: answer.sessions ?? [], next: answer.nextPageToken };
  }, (sessions) => (sessions.length ? table("Sessions", HEADS, h("tbody", null, sessions.map((one) => row(one, memory))), "sessions")
    : h("p", { class: "empty" }, "No session matches. An observation names its session itself.")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    remember({ ...readForm(form), page: null });
    open().catch((error) => { if (!signal.aborted) show(rows, h("p", { class: "problem", role: "alert" }, error.message)); });
  });
  return open();
}

/** The link to a session's fragments in the timeline. */
export const sessionLink = (memory, session) => `${link("m", memory.namespace, memory.memory, "timeline")}?${new URLSearchParams({ session })}`;

function row(one, memory) {
  const speakers = one.speakers ?? [];
  const more = Number(one.speakerCount ?? 0) - speakers.length;
  return h("tr", null, h("th", { scope: "row" }, h("a", { href: sessionLink(memory, one.session) }, given(one.session))),
    h("td", null, time(one.firstObserveTime)), h("td", null, time(one.lastObserveTime)), h("td", { class: "number" }, count(one.fragments)),
    h("td", null, speakers.map((speaker, at) => [at > 0 && ", ", given(speaker)]), more > 0 && ` and ${count(more)} more`));
}
