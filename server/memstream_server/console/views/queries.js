// The standing queries that clients have open on a memory, read again every two seconds.

import { call } from "../api.js";
import { clipped, given, h, notify, show, table } from "../dom.js";
import { count, textOf, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { rightsIn } from "../session.js";
import { pause } from "../shared_stream.js";

const POLL_MS = 2_000;
const HEADS = ["Query", "Filter", "Session", "Opened by", "Opened", "Last change", ["Messages", "number"], ["Results", "number"]];

export async function render({ place, signal, memory }) {
  if (!(await rightsIn(memory.namespace)).has("recall")) {
    return show(place, h("p", { class: "empty" }, "Your key does not have the right to list standing queries (recall)."));
  }
  const rows = h("div");
  show(place, h("p", { class: "quiet" }, "A standing query is open as long as its client's stream. The server sends its answer, and then each change of it."), rows);
  let token = "";
  let shown = new Map();
  const read = async (pageToken) => {
    const { queries = [], nextPageToken } = await call("MemoryService/ListStandingQueries", { ...memory, pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: queries, next: nextPageToken };
  };
  const body = h("tbody");
  const draw = (queries) => {
    const before = shown;
    shown = new Map(queries.map((one) => [one.id, refreshed(before.get(one.id), one)]));
    show(body, [...shown.values()].map((each) => each.row));
    return queries.length ? table("Standing queries", HEADS, body) : h("p", { class: "empty" }, "No standing query is open.");
  };
  const open = paged(rows, async (pageToken) => { token = pageToken; return read(pageToken); }, draw);
  await open();
  poll(async () => {
    const asked = token;
    const { rows: found } = await read(asked);
    if (asked === token) show(rows.firstElementChild, draw(found));
  }, signal);
}

async function poll(refresh, signal) {
  while (!signal.aborted) {
    await pause(POLL_MS, signal);
    if (document.hidden || signal.aborted) continue;
    try {
      await refresh();
      notify("");
    } catch (error) {
      if (!signal.aborted) notify(error.message, "bad");
    }
  }
}

/** The row of a query: one that is shown keeps its text, which may be opened. */
function refreshed(before, one) {
  const cells = before ?? firstCells(one);
  show(cells.change, time(one.changeTime));
  show(cells.messages, count(one.messagesSent));
  show(cells.results, count(one.recollections));
  return cells;
}

function firstCells(one) {
  const [change, messages, results] = [h("td"), h("td", { class: "number" }), h("td", { class: "number" })];
  const { query = {} } = one;
  const text = query.structured === undefined ? query.text ?? "" : textOf(query);
  const row = h("tr", { "data-id": one.id }, h("td", null, clipped(text, 200)), h("td", null, clipped(filterText(query.filter), 200)),
    h("td", null, given(one.session)), h("td", null, given(one.principal)), h("td", null, time(one.openTime)), change, messages, results);
  return { row, change, messages, results };
}

/** The conditions of a filter as text: speakers: Joy; tiers: TIER_LONG_TERM. */
function filterText(filter) {
  const value = (each) => (typeof each === "object" ? JSON.stringify(each) : String(each));
  return Object.entries(filter ?? {}).map(([name, given]) => `${name}: ${[given].flat().map(value).join(", ")}`).join("; ");
}
