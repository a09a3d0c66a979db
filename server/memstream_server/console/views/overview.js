// The first page: what there is in all namespaces, what happened last, what needs a decision; and how to begin.

import { call } from "../api.js";
import { createBox } from "../creating.js";
import { append, h, show, table, visible } from "../dom.js";
import { bytes, count, enumName, link, time } from "../format.js";
import { rightsIn } from "../session.js";
import { beginnersGuide } from "../guide.js";

const NAMESPACES_MAX = 200;
const MEMORIES_MAX = 200; // of a namespace
const RECENT = 20;
const AT_ONCE = 4;
const NEAR = 0.9; // of a quota

export async function render({ place, signal }) {
  const [{ namespaces = [], nextPageToken }, info] = await Promise.all([
    call("MemoryService/ListNamespaces", { pageSize: NAMESPACES_MAX }, signal), call("ServerService/GetServerInfo", {}, signal)]);
  const [first] = namespaces;
  const may = await rightsIn(first?.name ?? "default");
  if (!first) {
    return show(place, drawHealth(info), h("p", { class: "empty" }, "There are no memories that you may read."), may.has("write") && [createBox("default", signal, true), beginnersGuide()]);
  }
  const decisions = h("ul", { class: "decisions" });
  const needs = h("section", { "aria-label": "Needs a decision" }, h("h2", null, "Needs a decision"), decisions);
  const rows = new Map(namespaces.map((one) => [one.name, rowOf(one)]));
  const recent = h("div", null, h("p", { class: "quiet", role: "status" }, "The memories are read …"));
  show(place, drawHealth(info), needs,
    h("h2", null, "Namespaces"), table("Namespaces", ["Namespace", ["Memories", "number"], ["Fragments", "number"], ["Stored", "number"], "Of its quota", "Last change", "Memory that changed last"], h("tbody", null, [...rows.values()].map(({ row }) => row)), "namespaces"),
    nextPageToken && h("p", { class: "quiet" }, `The first ${count(NAMESPACES_MAX)} namespaces are listed.`),
    h("h2", null, "Changed last"), recent, may.has("write") && createBox(first.name, signal));
  const list = new Decisions(decisions, signal);
  for (const one of namespaces) list.addQuotas(one);
  list.addServer(info);
  await Promise.all([fill(namespaces, rows, recent, list, signal), list.addOperations()]);
  list.end();
  return undefined;
}

function drawHealth(info) {
  const failing = (info.models ?? []).filter(({ state }) => state === "MODEL_STATE_FAILING");
  const good = !info.degraded && !failing.length;
  return h("p", { class: "health" }, h("span", { class: `mark ${good ? "good" : "warn"}` }, good ? "the server is well" : "the server is degraded"),
    h("span", { class: "quiet" }, ` memstream ${info.version ?? ""}, up since `, time(info.startTime), `, ${info.embedding?.name ?? ""}, ${info.index ?? ""} `, h("a", { href: link("server") }, "more")));
}

function rowOf({ name, memories, stored = {}, bytesMax }) {
  const [fragments, changed, latest] = [h("td", { class: "number" }, "·"), h("td", null, "·"), h("td")];
  const most = Number(bytesMax ?? 0);
  const share = most ? Number(stored.total ?? 0) / most : 0;
  const row = h("tr", null, h("th", { scope: "row" }, h("a", { href: link("namespace", name) }, name)), h("td", { class: "number" }, count(memories)), fragments,
    h("td", { class: "number" }, bytes(stored.total ?? 0)), h("td", null, most ? [h("meter", { min: 0, max: 1, high: NEAR, value: share, "aria-label": `quota of ${name}` }), ` ${Math.round(100 * share)} % of ${bytes(most)}`] : h("span", { class: "quiet" }, "no quota")), changed, latest);
  return { row, fragments, changed, latest };
}

/** Reads the memories of each namespace, some at a time; then what the latest ones have open. */
async function fill(namespaces, rows, recent, list, signal) {
  const all = [];
  await eachOf(namespaces, async ({ name }) => {
    const { memories = [], nextPageToken } = await call("MemoryService/ListMemories", { namespace: name, pageSize: MEMORIES_MAX }, signal);
    const { fragments, changed, latest } = rows.get(name);
    const more = nextPageToken ? "+" : "";
    const last = memories.reduce((one, other) => ((other.changeTime ?? "") > (one?.changeTime ?? "") ? other : one), null);
    show(fragments, `${count(memories.reduce((sum, one) => sum + Number(one.fragments ?? 0), 0))}${more}`);
    show(changed, last && time(last.changeTime), more && h("span", { class: "quiet" }, ` of the first ${count(MEMORIES_MAX)}`));
    show(latest, last && h("a", { href: link("m", name, last.name) }, last.name));
    all.push(...memories);
  }, signal);
  all.sort((one, other) => ((one.changeTime ?? "") < (other.changeTime ?? "") ? 1 : -1));
  const latest = all.slice(0, RECENT);
  const body = h("tbody");
  show(recent, table("Memories that changed last", ["Memory", "Kind", ["Fragments", "number"], "Last change", "State"], body, "recent"));
  await eachOf(latest, async (memory) => {
    const cell = h("td");
    append(body, h("tr", null, h("th", { scope: "row" }, h("a", { href: link("m", memory.namespace, memory.name) }, `${memory.namespace}/${memory.name}`)), h("td", null, enumName(memory.kind, "MEMORY_KIND_")),
      h("td", { class: "number" }, count(memory.fragments)), h("td", null, time(memory.changeTime)), cell));
    await list.addMemory(memory, cell);
  }, signal);
}

async function eachOf(items, run, signal) {
  const waiting = [...items];
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    while (waiting.length && !signal.aborted) await run(waiting.shift());
  }));
}

/** The list of what somebody should decide about. */
class Decisions {
  constructor(place, signal) {
    Object.assign(this, { place, signal });
  }

  add(text, href, word) {
    append(this.place, h("li", null, h("span", { class: "mark warn" }, word), " ", h("a", { href }, text)));
  }

  end() {
    if (!this.place.children.length) append(this.place, h("li", { class: "empty" }, `Nothing, as far as the ${RECENT} memories that changed last say.`));
  }

  addServer({ degraded, models = [] }) {
    if (degraded) this.add(visible(degraded), link("server"), "degraded");
    for (const { role, model, state, lastError } of models) {
      if (state === "MODEL_STATE_FAILING") this.add(`${role} (${model}) fails: ${visible(lastError ?? "")}`, link("server"), "model");
    }
  }

  addQuotas({ name, stored = {}, bytesMax }) {
    const share = Number(bytesMax ?? 0) ? Number(stored.total ?? 0) / Number(bytesMax) : 0;
    if (share >= NEAR) this.add(`${name} uses ${Math.round(100 * share)} % of its quota of ${bytes(bytesMax)}`, link("namespace", name), "quota");
  }

  async addOperations() {
    const { operations = [] } = await call("OperationService/ListOperations", { pageSize: 100 }, this.signal).catch(() => ({}));
    for (const one of operations) {
      if (one.state !== "OPERATION_STATE_FAILED") continue;
      this.add(`${one.type} of ${[one.namespace, one.memory].filter(Boolean).join("/") || "the server"}: ${visible(one.error?.message ?? "failed")}`, link("operations"), "failed");
    }
  }

  async addMemory({ namespace, name }, cell) {
    const memory = { namespace, memory: name };
    const [{ stats = {} }, { conflicts = [], nextPageToken }] = await Promise.all([
      call("MemoryService/GetMemoryStats", memory, this.signal), call("MemoryService/ListConflicts", { ...memory, pageSize: 100 }, this.signal)]);
    const found = [];
    if (conflicts.length) {
      const number = `${conflicts.length}${nextPageToken ? "+" : ""}`;
      found.push(`${number} open conflicts`);
      this.add(`${namespace}/${name}: ${number} pairs of statements that may not be true together`, link("m", namespace, name, "conflicts"), "conflicts");
    }
    if (Number(stats.unvectored ?? 0)) found.push(`${count(stats.unvectored)} without a vector`);
    if (Number(stats.backlog ?? 0)) found.push(`${count(stats.backlog)} not stored yet`);
    show(cell, found.map((text) => h("span", { class: "mark warn" }, text)), !found.length && h("span", { class: "quiet" }, Number(stats.forgotten ?? 0) ? `${count(stats.forgotten)} forgotten` : "–"));
  }
}
