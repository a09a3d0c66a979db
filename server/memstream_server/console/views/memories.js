// The memories of a namespace: names, labels, sizes and backlog, a page at a time.

import { remember } from "../address.js";
import { call } from "../api.js";
import { createBox } from "../creating.js";
import { field, given, h, notify, select, show, table, visible } from "../dom.js";
import { bytes, count, enumName, link, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { rightsIn } from "../session.js";

const NAMESPACES_MAX = 1_000;
const COUNTS_AT_ONCE = 4;
const TYPING_MS = 200;

export async function render({ place, signal, query }) {
  const { namespaces = [], nextPageToken } = await call("MemoryService/ListNamespaces", { pageSize: NAMESPACES_MAX }, signal);
  if (!namespaces.length) {
    const rights = await rightsIn("default");
    return show(place, h("p", { class: "empty" }, "There are no memories that you may read."), rights.has("write") && createBox("default", signal, true));
  }
  const asked = query.get("namespace");
  const names = namespaces.map(({ name }) => name);
  const first = asked ?? names[0];
  const options = namespaces.map(({ name, memories }) => [name, `${name} (${count(memories)})`]);
  if (!names.includes(first)) options.unshift([first, first]);
  const namespace = select("namespace", options, first);
  const prefix = h("input", { type: "search", name: "prefix", value: query.get("prefix") ?? "", autocomplete: "off" });
  const label = h("input", { type: "search", name: "label", placeholder: "key=value", autocomplete: "off" });
  const rows = h("div");
  const form = h("form", { class: "filters", role: "search" }, field("Namespace", namespace), field("Name begins with", prefix),
    field("Label", label, "Enter adds it"), h("button", { type: "submit" }, "Show"));
  const chosen = h("p", { class: "labels", "aria-label": "Chosen labels", role: "group", hidden: true });
  const chosenSpace = namespaces.find(({ name }) => name === namespace.value);
  const may = await rightsIn(namespace.value);
  show(place, may.has("write") && createBox(namespace.value, signal), form, chosenSpace && sizeOf(chosenSpace), chosen, nextPageToken && h("p", { class: "quiet" }, `The first ${count(NAMESPACES_MAX)} namespaces are listed.`), rows);

  const counts = countsOf(signal);
  const labels = new Map(query.getAll("label").map((pair) => pair.match(/^([^=]+)=(.*)$/s)?.slice(1)).filter(Boolean));
  const open = paged(rows, async (pageToken) => {
    const request = { namespace: namespace.value, namePrefix: prefix.value.trim(), labels: Object.fromEntries(labels), pageSize: PAGE_SIZE, pageToken };
    const answer = await call("MemoryService/ListMemories", request, signal);
    return { rows: answer.memories ?? [], next: answer.nextPageToken };
  }, (memories) => {
    counts.clear();
    const body = h("tbody", null, memories.map((memory) => rowOf(memory, counts, choose)));
    const heads = ["Memory", "Kind", ["Fragments", "number"], ["Sensory", "number"], ["Short-term", "number"], ["Long-term", "number"], ["Backlog", "number"],
      ["Not indexed", "number"], ["No vector", "number"], "Labels", ["Revision", "number"], "Created"];
    return memories.length ? table("Memories", heads, body, "memories") : h("p", { class: "empty" }, labels.size ? "No memory has such a name and these labels." : "No memory has such a name.");
  });

  let typing;
  const reopen = () => {
    rememberFilters(prefix.value.trim(), labels);
    return open().catch((error) => { if (!signal.aborted) notify(error.message, "bad"); });
  };

  /** Lists only memories with this label too; a value of null ends that. */
  function choose(key, value) {
    if (value === null) labels.delete(key);
    else labels.set(key, value);
    drawChosen();
    reopen();
  }

  function drawChosen() {
    chosen.hidden = labels.size === 0;
    show(chosen, [...labels].map(([name, text]) => h("button", {
      type: "button", class: "label", "aria-label": `List without ${visible(name)}=${visible(text)}`, onclick: () => choose(name, null),
    }, given(`${name}=${text}`), " ×")));
  }

  function submit() {
    const [, key, value] = label.value.trim().match(/^([^=]+)=(.*)$/s) ?? [];
    if (label.value.trim() && key === undefined) return notify("A label is written as key=value.", "bad");
    notify("");
    if (key === undefined) return reopen();
    label.value = "";
    return choose(key, value);
  }

  namespace.addEventListener("change", () => { location.hash = link("namespace", namespace.value); });
  prefix.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(reopen, TYPING_MS); });
  form.addEventListener("submit", (event) => { event.preventDefault(); clearTimeout(typing); submit(); });
  drawChosen();
  return open();
}

/** Writes the filters into the address: a prefix, and any number of labels. */
function rememberFilters(prefix, labels) {
  remember({ prefix, page: null, label: null }, null, [...labels].map(([key, value]) => ["label", `${key}=${value}`]));
}

const NEAR = 0.9;

/** What a namespace stores, and how near it is to its quotas. */
function sizeOf({ stored = {}, bytesMax, receiptsBytesMax }) {
  const kinds = ["fragments", "history", "receipts", "conversations", "requests"].filter((kind) => Number(stored[kind] ?? 0));
  const part = (name, size, most) => h("span", { class: Number(size) >= NEAR * Number(most) && Number(most) ? "warn" : null },
    `${name}${bytes(size)}${Number(most) ? ` of ${bytes(most)} (${Math.round(100 * Number(size) / Number(most))} %)` : ""}`);
  const parts = kinds.map((kind) => part(`${kind} `, stored[kind] ?? 0, kind === "receipts" ? receiptsBytesMax : 0));
  return h("p", { class: "quiet", "data-stored": "" }, "Stores ", part("", stored.total ?? 0, bytesMax),
    parts.length ? ": " : ".", parts.flatMap((one, at) => (at ? [", ", one] : [one])));
}

function rowOf(memory, counts, choose) {
  const labels = Object.entries(memory.labels ?? {}).map(([name, value]) => h("button", {
    type: "button", class: "label", title: "List the memories with this label", onclick: () => choose(name, value),
  }, given(`${name}=${value}`)));
  const numbers = ["sensory", "shortTerm", "longTerm", "backlog", "unindexed", "unvectored"].map((name) => h("td", { class: "number", "data-count": name }, "·"));
  const row = h("tr", null,
    h("th", { scope: "row" }, h("a", { href: link("m", memory.namespace, memory.name) }, memory.name)),
    h("td", null, enumName(memory.kind, "MEMORY_KIND_")), h("td", { class: "number" }, count(memory.fragments ?? 0)), numbers, h("td", { class: "labels" }, labels),
    h("td", { class: "number" }, count(memory.revision)), h("td", null, time(memory.createTime)));
  counts.add(row, memory);
  return row;
}

/** Counts the memories whose rows are in view, some at a time. */
function countsOf(signal) {
  const memories = new WeakMap();
  let waiting = [];
  let running = 0;
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      observer.unobserve(target);
      waiting.push(target);
    }
    next();
  });
  signal.addEventListener("abort", () => { observer.disconnect(); waiting = []; });

  async function next() {
    while (running < COUNTS_AT_ONCE && waiting.length) {
      running += 1;
      fill(waiting.shift()).finally(() => { running -= 1; next(); });
    }
  }

  async function fill(row) {
    const { namespace, name } = memories.get(row);
    try {
      const { stats = {} } = await call("MemoryService/GetMemoryStats", { namespace, memory: name }, signal);
      for (const cell of row.querySelectorAll("[data-count]")) {
        const value = Number(stats[cell.dataset.count] ?? 0);
        cell.textContent = count(value);
        cell.classList.toggle("zero", value === 0);
        cell.classList.toggle("warn", value > 0 && (cell.dataset.count === "backlog" || cell.dataset.count === "unvectored"));
      }
    } catch (error) {
      if (signal.aborted) return;
      for (const cell of row.querySelectorAll("[data-count]")) cell.textContent = "–";
      row.setAttribute("title", error.message);
    }
  }

  return {
    add(row, memory) { memories.set(row, memory); observer.observe(row); },
    clear() { observer.disconnect(); waiting = []; },
  };
}
