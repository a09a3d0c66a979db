// What a memory has spent on models, by purpose: the sum of its events, read when the box is opened.

import { call } from "./api.js";
import { action, h, show, table, visible } from "./dom.js";
import { count } from "./format.js";
import { beginsAfter, PART_EVENTS, readLog } from "./history.js";

const NUMBERS = ["requests", "promptTokens", "completionTokens"];
const HEADS = [["Requests", "number"], ["Prompt tokens", "number"], ["Completion tokens", "number"]];

/** A box that reads the log of the memory when it is opened. */
export function spendingBox(memory, signal) {
  const body = h("div");
  const box = h("details", { class: "box" }, h("summary", null, "Use of models by this memory"), body);
  box.addEventListener("toggle", () => { if (box.open && !body.hasChildNodes()) new Spending(body, memory, signal).readOn(); });
  return box;
}

/** A table of uses with a line for their sum. `uses`: objects with NUMBERS; `names`: the first cells of a row. */
export function drawSpending(caption, names, uses, numbers, heads) {
  const cells = (use) => numbers.map((name) => h("td", { class: "number" }, count(use[name])));
  const rows = uses.map((use) => {
    const [first, ...rest] = names.map(([, name]) => visible(use[name]));
    return h("tr", null, h("th", { scope: "row" }, first), rest.map((text) => h("td", null, text)), cells(use));
  });
  const sum = Object.fromEntries(numbers.map((name) => [name, uses.reduce((total, use) => total + Number(use[name] ?? 0), 0)]));
  const total = uses.length > 1 && h("tr", { class: "sum" }, h("th", { scope: "row" }, "together"), names.slice(1).map(() => h("td")), cells(sum));
  return table(caption, [...names.map(([head]) => head), ...heads], h("tbody", null, rows, total));
}

class Spending {
  constructor(body, memory, signal) {
    Object.assign(this, { body, memory, signal });
    this.uses = new Map();
    this.cursor = null;
    this.kept = "";
  }

  async readOn() {
    show(this.body, h("p", { class: "quiet", role: "status" }, "The log is read …"));
    try {
      if (!this.cursor) {
        const { memory } = await call("MemoryService/GetMemory", this.memory, this.signal);
        this.revision = memory.revision ?? "0";
        this.cursor = { memoryUid: memory.uid, revision: "0" };
      }
      const found = await readLog(this.memory, ["EVENT_TYPE_MODEL_ASKED"], this.cursor, this.revision, this.signal, (events) => events.forEach((event) => this.add(event)));
      this.cursor = found.cursor;
      this.draw(found.whole);
    } catch (error) {
      if (this.signal.aborted) return undefined;
      const begin = beginsAfter(error, this.cursor ?? {});
      if (!begin) return show(this.body, h("p", { class: "problem", role: "alert" }, error.message));
      this.cursor = begin;
      this.kept = ` Events up to revision ${count(begin.revision)} are no longer kept.`;
      return this.readOn();
    }
  }

  add({ modelUse }) {
    if (!modelUse) return;
    const { purpose, model } = modelUse;
    const key = JSON.stringify([purpose, model]);
    const use = this.uses.get(key) ?? { purpose, model };
    for (const name of NUMBERS) use[name] = Number(use[name] ?? 0) + Number(modelUse[name] ?? 0);
    this.uses.set(key, use);
  }

  draw(whole) {
    const uses = [...this.uses.values()];
    show(this.body, uses.length
      ? drawSpending("Use of models by this memory", [["Purpose", "purpose"], ["Model", "model"]], uses, NUMBERS, HEADS)
      : h("p", { class: "empty" }, "No LLM was asked on its behalf."),
      h("p", { class: "quiet" }, `Up to revision ${count(this.cursor.revision)}; embeddings are not counted by memory.${this.kept}`),
      whole ? null : action(`Read ${count(PART_EVENTS)} more`, () => this.readOn()));
  }
}
