// The fragments that are selected in a list, and what can be done with them together.

import { call } from "./api.js";
import { action, confirmed, download, h, notify, show } from "./dom.js";
import { count, link } from "./format.js";

const IDS_MAX = 1_000; // of one call
const ALL_MAX = 100_000;

export class Selection {
  /** `request()` is the list, without a page; `changed()` is called after the fragments were changed. */
  constructor(memory, rights, signal, request, changed) {
    Object.assign(this, { memory, rights, signal, request, changed });
    this.ids = new Set();
    this.shown = [];
    this.forgotten = false;
    this.bar = h("div", { class: "bar selection", role: "group", "aria-label": "Selection" });
  }

  /** Takes the fragments of a page; what was selected on another one stays selected. */
  show(fragments, forgotten) {
    if (forgotten !== this.forgotten) this.ids.clear();
    this.shown = fragments.map(({ id }) => id);
    this.forgotten = forgotten;
    this.boxes = new Map();
    this.drawBar();
  }

  box(id) {
    const box = h("input", { type: "checkbox", "aria-label": `Select ${id.slice(-8)}` });
    box.checked = this.ids.has(id);
    box.addEventListener("change", () => { this.mark([id], box.checked); });
    this.boxes.set(id, box);
    return box;
  }

  /** The box in the head of the table, for the page. */
  head() {
    this.whole = h("input", { type: "checkbox", "aria-label": "Select this page" });
    this.whole.addEventListener("change", () => this.mark(this.shown, this.whole.checked));
    this.drawBar();
    return this.whole;
  }

  mark(ids, chosen) {
    for (const id of ids) {
      if (chosen) this.ids.add(id);
      else this.ids.delete(id);
      const box = this.boxes.get(id);
      if (box) box.checked = chosen;
    }
    this.drawBar();
  }

  drawBar() {
    if (this.whole) this.whole.checked = this.shown.length > 0 && this.shown.every((id) => this.ids.has(id));
    const some = this.ids.size > 0;
    const may = (right, button) => some && this.rights.has(right) && button();
    show(this.bar, h("span", { role: "status" }, some ? `${count(this.ids.size)} selected` : "Nothing is selected."),
      this.shown.length > 0 && action("Select all that match", () => this.selectAll()),
      some && action("Select none", () => this.mark([...this.ids], false)),
      may("forget", () => (this.forgotten ? action("Restore", () => this.send("RestoreFragments", "restored"))
        : action("Forget", () => this.send("ForgetFragments", "forgotten"), "danger"))),
      may("forget", () => action("Erase …", () => this.erase(), "danger")),
      some && action("Export", () => this.save()));
  }

  /** Every page of the list. */
  async* pages() {
    let pageToken = "";
    do {
      const answer = await call("MemoryService/ListFragments", { ...this.request(), pageSize: IDS_MAX, pageToken }, this.signal);
      yield answer.fragments ?? [];
      pageToken = answer.nextPageToken ?? "";
    } while (pageToken);
  }

  async selectAll() {
    for await (const fragments of this.pages()) {
      this.mark(fragments.map(({ id }) => id), true);
      if (this.ids.size >= ALL_MAX) return notify(`The first ${count(ALL_MAX)} are selected.`);
    }
    return undefined;
  }

  parts() {
    const ids = [...this.ids];
    return Array.from({ length: Math.ceil(ids.length / IDS_MAX) }, (_, part) => ids.slice(part * IDS_MAX, (part + 1) * IDS_MAX));
  }

  async send(method, word) {
    let done = 0;
    for (const ids of this.parts()) done += Number((await call(`MemoryService/${method}`, { ...this.memory, ids }, this.signal))[word] ?? 0);
    this.ids.clear();
    await this.changed();
    notify(word === "forgotten" ? `${count(done)} forgotten. They can be restored within the policy's grace period: list the forgotten ones.` : `${count(done)} restored.`);
  }

  async erase() {
    const number = String(this.ids.size);
    if (!(await confirmed(`Erase ${count(number)} fragments with their vectors, versions and all that derives from them, from every file. Nobody can restore them.`, number))) return;
    for (const ids of this.parts()) await call("MemoryService/EraseFragments", { ...this.memory, ids, requestId: crypto.randomUUID?.() }, this.signal);
    this.ids.clear();
    await this.changed();
    show(document.getElementById("notice"), h("p", null, "The erasure has started: ", h("a", { href: link("operations") }, "operations"), " shows it."));
  }

  /** Saves the selected fragments, a JSON object in each line, as ListFragments returns them. */
  async save() {
    const lines = [];
    for await (const fragments of this.pages()) {
      for (const fragment of fragments) if (this.ids.has(fragment.id)) lines.push(`${JSON.stringify(fragment)}\n`);
      if (lines.length === this.ids.size) break;
    }
    download(`${this.memory.namespace}-${this.memory.memory}-fragments.jsonl`, lines);
    notify(`${count(lines.length)} fragments are saved, one in each line.`);
  }
}
