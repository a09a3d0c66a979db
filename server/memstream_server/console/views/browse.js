// All fragments of a memory as a table: text, filters, order; forget, restore, erase and export what is selected.

import { readForm, remember, restoreForm } from "../address.js";
import { addBox } from "../adding.js";
import { call } from "../api.js";
import { clipped, field, given, h, hiddenMark, notify, select, show, table } from "../dom.js";
import { fragmentLink } from "../events.js";
import { drawUnmatched, filterFields, readFilter } from "../fragment_filter.js";
import { count, decimal, textOf, tierName, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { Selection } from "../selection.js";
import { rightsIn } from "../session.js";
import { sessionLink } from "./sessions.js";

// Columns: head, the order that it sorts by, the cell.
const COLUMNS = [
  ["Text", "LENGTH", (one) => h("td", { class: "text" }, clipped(textOf(one), 240), " ", marksOf(one))],
  ["Speaker", "SPEAKER", (one) => h("td", null, given(one.speaker))],
  ["Tier", "TIER", (one) => h("td", { class: "short" }, tierName(one.tier))],
  ["Importance", "IMPORTANCE", (one) => h("td", { class: "number" }, decimal(one.importance, 2))],
  ["Session", "SESSION", (one, memory) => h("td", null, one.session && h("a", { href: sessionLink(memory, one.session) }, given(one.session)))],
  ["Perceived", "OBSERVE_TIME", (one) => h("td", null, time(one.observeTime))],
  ["Recalled", "ACCESS_TIME", (one) => h("td", { class: "number" }, one.accessCount ? [`${count(one.accessCount)}× `, time(one.accessTime)] : "–")],
  ["Id", "RECEIPT", (one, memory) => h("td", null, fragmentLink(memory, one.id))],
];
const TRUTHS = [["", "all"], ["TRUTH_CURRENT", "current"]];

export async function render({ place, signal, memory, query }) {
  const rights = await rightsIn(memory.namespace);
  const [{ memory: described }, { stats = {} }] = await Promise.all([
    call("MemoryService/GetMemory", memory, signal), call("MemoryService/GetMemoryStats", memory, signal)]);
  const page = new Browse(place, memory, rights, signal, query);
  show(place, summaryOf(described, stats), rights.has("observe") && addBox(memory, signal, () => page.reopen()), page.form, page.selection.bar, page.rows);
  return page.open();
}

/** What the memory has, in one line. */
function summaryOf(described, stats) {
  const numbers = [["fragments", described.fragments], ["sensory", stats.sensory], ["short-term", stats.shortTerm], ["long-term", stats.longTerm],
    ["insights", stats.insights], ["forgotten", stats.forgotten], ["backlog", stats.backlog], ["without a vector", stats.unvectored]];
  return h("p", { class: "numbers" }, numbers.filter(([name, value], place) => place === 0 || Number(value ?? 0)).map(([name, value]) => h("span", null, `${name} `, h("b", null, count(value)))),
    h("span", null, "changed ", h("b", null, time(described.changeTime))));
}

class Browse {
  constructor(place, memory, rights, signal, query) {
    Object.assign(this, { place, memory, signal });
    const forgotten = h("input", { type: "checkbox", name: "forgotten" });
    this.form = h("form", { class: "filters", role: "search" },
      field("Text", h("input", { name: "text", type: "search", autocomplete: "off", maxlength: 1_000 }), "in the content, or an id"),
      field("Truth", select("truth", TRUTHS)), h("label", { class: "check" }, forgotten, "forgotten ones"),
      h("input", { type: "text", hidden: true, name: "order" }), h("input", { type: "text", hidden: true, name: "down" }),
      h("button", { type: "submit", class: "main" }, "Show"),
      h("details", { class: "more" }, h("summary", null, "More filters"), h("div", { class: "fields" }, filterFields())));
    restoreForm(this.form, query);
    const [more] = this.form.getElementsByTagName("details");
    more.open = [...more.querySelectorAll("[name]")].some((control) => query.get(control.name));
    this.form.elements.session.dataset.exact = query.get("session") ?? "";
    this.rows = h("div");
    this.selection = new Selection(memory, rights, signal, () => this.request(), () => this.reopen());
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    this.open = paged(this.rows, (pageToken) => this.read(pageToken), (fragments, { unmatched }) => [drawUnmatched(unmatched), this.draw(fragments)]);
  }

  /** The list that the form asks for. */
  request() {
    const { elements } = this.form;
    const forgotten = elements.forgotten.checked;
    const request = { ...this.memory, filter: readFilter(elements), pageSize: PAGE_SIZE };
    if (elements.text.value.trim()) request.text = elements.text.value.trim();
    if (elements.truth.value) request.truth = elements.truth.value;
    if (forgotten) return { ...request, forgotten };
    const order = elements.order.value;
    // The latest first, unless another order is asked for.
    return { ...request, order: `FRAGMENT_ORDER_${order || "RECEIPT"}`, descending: order ? elements.down.value === "1" : true };
  }

  async read(pageToken) {
    const { fragments = [], nextPageToken, unmatched = [] } = await call("MemoryService/ListFragments", { ...this.request(), pageToken }, this.signal);
    return { rows: fragments, next: nextPageToken, unmatched };
  }

  draw(fragments) {
    const forgotten = this.form.elements.forgotten.checked;
    this.selection.show(fragments, forgotten);
    if (!fragments.length) return h("p", { class: "empty" }, this.isFiltered() ? "No fragment matches." : "This memory is empty: add a fragment above, or observe with an SDK.");
    const rows = fragments.map((one) => h("tr", { "data-id": one.id }, h("td", null, this.selection.box(one.id)), COLUMNS.map(([, , cell]) => cell(one, this.memory))));
    const heads = COLUMNS.map(([label, order]) => [forgotten ? label : this.drawHead(label, order), ["IMPORTANCE", "ACCESS_TIME"].includes(order) ? "number" : ""]);
    const made = table("Fragments", [this.selection.head(), ...heads], h("tbody", null, rows), "fragments");
    for (const [place, [, order]] of COLUMNS.entries()) {
      if (!forgotten && order === this.orderNow()) made.querySelectorAll("th")[place + 1].setAttribute("aria-sort", this.isDown() ? "descending" : "ascending");
    }
    return made;
  }

  orderNow() {
    return this.form.elements.order.value || "RECEIPT";
  }

  isDown() {
    return this.form.elements.order.value === "" || this.form.elements.down.value === "1";
  }

  isFiltered() {
    return Object.entries(readForm(this.form)).some(([name, value]) => value && !["order", "down"].includes(name));
  }

  /** A head that sorts by its column, and turns the order round when it is pressed again. */
  drawHead(label, order) {
    const here = order === this.orderNow();
    const arrow = here ? (this.isDown() ? " ▼" : " ▲") : "";
    return h("button", { type: "button", class: "sort", title: order === "LENGTH" ? "Sort by its length" : `Sort by ${label.toLowerCase()}`, onclick: () => {
      const { elements } = this.form;
      elements.down.value = here ? (this.isDown() ? "" : "1") : ["IMPORTANCE", "OBSERVE_TIME", "ACCESS_TIME", "LENGTH"].includes(order) ? "1" : "";
      elements.order.value = order;
      this.submit();
    } }, label, h("span", { "aria-hidden": "true" }, arrow));
  }

  submit() {
    remember({ ...readForm(this.form), page: null });
    this.reopen();
  }

  async reopen() {
    try {
      await this.open();
      notify("");
    } catch (error) {
      if (!this.signal.aborted) notify(error.message, "bad");
    }
  }
}

export function marksOf(fragment) {
  return [hiddenMark(fragment), fragment.kind === "FRAGMENT_KIND_INSIGHT" && h("span", { class: "mark" }, "insight"), fragment.pinned && h("span", { class: "mark" }, "pinned"),
    fragment.supersededBy && h("span", { class: "mark" }, "superseded"), fragment.forgetTime && h("span", { class: "mark warn" }, "forgotten")];
}
