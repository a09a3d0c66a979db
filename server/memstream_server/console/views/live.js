// One memory as it changes: its tiers, and every step with its reason. Bounded: rows leave at the end of the table.

import { call } from "../api.js";
import { append, field, given, h, hiddenMark, notify, select, show, table, visible, cut } from "../dom.js";
import { EVENT_HEADS, eventName, eventRow, fragmentLink, revisionOf } from "../events.js";
import { bytes, count, enumName, textOf } from "../format.js";
import { spendingBox } from "../spending.js";
import { SHOWN_MAX, Tiers } from "../tiers.js";
import { watch } from "../watch.js";

const ROWS_MAX = 200;
const PENDING_MAX = 500;
const CARD_CHARACTERS = 160;
const CHANGES_CONFLICTS = /CONFLICT|SUPERSEDED/;
const STATS_MS = 5_000;
const REVISIONS_BEFORE = 3;
const TIERS = [["sensory", "Sensory"], ["shortTerm", "Short-term"], ["longTerm", "Long-term"]];
const EMPTY_WORDS = { sensory: "empty", shortTerm: "empty", longTerm: "nothing new since this page was opened" };

export async function render({ place, signal, memory }) {
  const [{ memory: described }, first] = await Promise.all([call("MemoryService/GetMemory", memory, signal), readState(memory, signal)]);
  const page = layout(described, memory, spendingBox(memory, signal));
  show(place, page.root);
  new Live(page, memory, first, signal).run();
}

/** The tiers at one revision, and the cursor from which a watch continues. */
async function readState(memory, signal) {
  const listing = { ...memory, pageSize: 1_000, filter: { tiers: ["TIER_SENSORY", "TIER_SHORT_TERM"] } };
  for (let tries = 0; ; tries += 1) {
    const [listed, { stats = {} }] = await Promise.all([
      call("MemoryService/ListFragments", listing, signal), call("MemoryService/GetMemoryStats", memory, signal)]);
    // Both are of one revision, unless a commit came between; a busy memory gets the numbers of the later one.
    if ((stats.revision ?? "0") !== (listed.revision ?? "0") && tries < 3) continue;
    return {
      tiers: new Tiers(stats, listed.fragments ?? []),
      cursor: { memoryUid: listed.memoryUid, revision: listed.revision ?? "0" },
      stats,
    };
  }
}

function layout(described, memory, spending) {
  const policy = described.policy ?? {};
  const capacity = { sensory: policy.sensory?.capacity, shortTerm: policy.shortTerm?.capacity };
  const columns = {};
  const panes = TIERS.map(([name, title]) => {
    const number = h("span", { class: "count" });
    const gauge = capacity[name] ? h("meter", { min: 0, max: capacity[name], "aria-label": `${title}: filled` }) : null;
    const list = h("ol", { class: "cards", "aria-label": `${title} fragments` });
    columns[name] = { number, gauge, list, capacity: capacity[name] };
    return h("section", { class: "tier", "data-tier": name }, h("h2", null, title, " ", number), gauge, list);
  });
  const state = h("span", { class: "state", role: "status" }, "connecting");
  const pause = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
  const types = select("type", [["", "all"]]);
  const body = h("tbody");
  const numbers = h("p", { class: "numbers" });
  const kind = enumName(described.kind, "MEMORY_KIND_");
  const labels = Object.entries(described.labels ?? {}).map(([name, value]) => given(`${name}=${value}`, "label"));
  const root = [
    h("div", { class: "bar" }, state, pause, h("span", { class: "quiet" }, kind), labels, numbers),
    h("div", { class: "tiers" }, panes),
    spending,
    h("div", { class: "bar" }, h("h2", null, "Steps"), field("Event", types),
      h("span", { class: "quiet" }, `the last ${ROWS_MAX}, newest first`)),
    table("Steps, newest first", EVENT_HEADS, body, "steps"),
  ];
  return { root, columns, state, pause, types, body, numbers, memory };
}

class Live {
  constructor(page, memory, first, signal) {
    Object.assign(this, page);
    this.memory = memory;
    this.signal = signal;
    this.tiers = first.tiers;
    // The steps of the last revisions are shown too, but they are in the tiers already.
    this.applied = Number(first.cursor.revision);
    this.cursor = { ...first.cursor, revision: String(Math.max(0, this.applied - REVISIONS_BEFORE)) };
    this.stats = first.stats;
    this.pending = [];
    this.known = new Set();
    this.changed = new Set(TIERS.map(([name]) => name));
    this.frame = 0;
    this.watching = null;
    this.wasLive = false;
  }

  run() {
    this.pause.addEventListener("click", () => this.toggle());
    this.types.addEventListener("change", () => this.filterRows());
    const timer = setInterval(() => this.readStats(), STATS_MS);
    this.signal.addEventListener("abort", () => {
      clearInterval(timer);
      cancelAnimationFrame(this.frame);
      this.watching?.abort();
    });
    this.drawTiers();
    this.drawNumbers();
    this.start();
  }

  async start() {
    const watching = new AbortController();
    this.watching = watching;
    try {
      const last = await watch(this.memory, this.cursor, watching.signal, {
        events: (events, fragments) => this.take(events, fragments),
        state: (text, detail) => this.showState(text, detail),
        void: () => this.reload(),
      });
      if (this.watching === watching) this.cursor = last;
    } catch (error) {
      if (!this.signal.aborted) this.showState("ended", error.message);
    }
  }

  /** A pause ends the stream; going on resumes at the cursor, so nothing is kept meanwhile. */
  toggle() {
    const paused = this.pause.getAttribute("aria-pressed") === "true";
    this.pause.setAttribute("aria-pressed", String(!paused));
    if (paused) {
      this.showState("connecting");
      this.start();
    } else {
      this.flush();
      this.watching.abort();
      this.showState("paused");
    }
    show(this.pause, paused ? "Pause" : "Continue");
  }

  async reload() {
    const state = await readState(this.memory, this.signal);
    this.tiers = state.tiers;
    this.cursor = state.cursor;
    this.applied = Number(state.cursor.revision);
    this.stats = state.stats;
    this.pending = [];
    this.changed = new Set(TIERS.map(([name]) => name));
    this.drawTiers();
    this.drawNumbers();
    if (this.wasLive) notify("The events from there on are not kept, or the memory was created again: the page shows its present state.");
    return this.cursor;
  }

  showState(text, detail = "") {
    if (text === "live") this.wasLive = true;
    if (this.state.textContent === text) return;
    this.state.dataset.state = text;
    show(this.state, text);
    this.state.setAttribute("title", detail);
    if (text === "ended") notify(detail, "bad");
  }

  take(events, fragments) {
    const current = new Map(fragments.map((fragment) => [fragment.id, fragment]));
    for (const event of events) {
      if (revisionOf(event) > this.applied) this.tiers.apply(event, current.get(event.fragmentId));
      this.pending.push(event);
    }
    if (events.length) this.cursor = events[events.length - 1].cursor;
    if (this.pending.length > PENDING_MAX) {
      this.flush(); // a hidden page gets no frames
    } else if (!this.frame) {
      this.frame = requestAnimationFrame(() => this.flush());
    }
  }

  flush() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const events = this.pending.slice(-ROWS_MAX).reverse();
    this.pending = [];
    if (!events.length || this.signal.aborted) return;
    if (events.some((event) => CHANGES_CONFLICTS.test(event.type))) this.state.dispatchEvent(new CustomEvent("conflicts", { bubbles: true }));
    const rows = events.map((event) => this.rowOf(event));
    this.body.prepend(...rows);
    while (this.body.rows.length > ROWS_MAX) this.body.lastChild.remove();
    this.drawTiers();
  }

  rowOf(event) {
    const name = eventName(event);
    if (!this.known.has(name)) {
      this.known.add(name);
      this.types.append(h("option", { value: name }, name));
    }
    const row = eventRow(event, this.memory);
    row.hidden = this.types.value !== "" && this.types.value !== name;
    return row;
  }

  filterRows() {
    for (const row of this.body.rows) row.hidden = this.types.value !== "" && row.dataset.type !== this.types.value;
  }

  drawTiers() {
    for (const [name] of TIERS) {
      const { number, gauge, list, capacity } = this.columns[name];
      const held = this.tiers.held[name];
      const total = this.tiers.counts[name];
      show(number, count(total), capacity ? ` of ${count(capacity)}` : "");
      if (gauge) gauge.value = total;
      drawCards(list, [...held.values()].slice(-SHOWN_MAX).reverse(), this.memory, EMPTY_WORDS[name]);
    }
  }

  async readStats() {
    if (document.hidden || this.pause.getAttribute("aria-pressed") === "true") return;
    try {
      this.stats = (await call("MemoryService/GetMemoryStats", this.memory, this.signal)).stats ?? {};
      if (this.stats.revision === this.cursor.revision && !Number(this.cursor.ordinal ?? 0)) this.tiers.correct(this.stats);
      this.drawNumbers();
    } catch {
      // The state of the watch says that the server does not answer.
    }
  }

  drawNumbers() {
    const { backlog, unindexed, unvectored, forgotten, insights, active, activeBytes } = this.stats;
    const parts = [["backlog", count(backlog)], ["not indexed", count(unindexed)], ["no vector", count(unvectored)], ["insights", count(insights)],
      ["forgotten", count(forgotten)], ["in RAM", active ? bytes(activeBytes) : "no"]];
    show(this.numbers, parts.map(([label, value]) => h("span", { class: "pair" }, `${label} `, h("b", null, value))));
  }
}

/** Cards that stay keep their element; so only what moved is drawn. */
function drawCards(list, fragments, memory, empty) {
  const former = new Map([...list.children].map((card) => [card.dataset.key, card]));
  const cards = fragments.map((fragment) => {
    const key = `${fragment.id} ${fragment.etag ?? ""} ${fragment.enhancementCount ?? 0}`;
    return former.get(key) ?? cardOf(fragment, memory, key);
  });
  const kept = new Set(cards);
  for (const card of former.values()) if (!kept.has(card)) card.remove();
  cards.forEach((card, place) => {
    if (list.children[place] !== card) list.insertBefore(card, list.children[place] ?? null);
  });
  if (!cards.length) append(list, h("li", { class: "empty" }, empty));
}

function cardOf(fragment, memory, key) {
  const text = textOf(fragment);
  const shown = text.length > CARD_CHARACTERS ? `${cut(text, CARD_CHARACTERS)}…` : text;
  const hits = Number(fragment.enhancementCount ?? 0);
  return h("li", { "data-key": key, class: "card" },
    h("bdi", { class: "content", dir: "auto" }, visible(shown)),
    h("span", { class: "quiet" }, fragmentLink(memory, fragment.id), fragment.speaker && [" ", given(fragment.speaker)],
      hits > 0 && ` enhanced ${count(hits)}×`, " ", hiddenMark(fragment), fragment.pinned && " pinned", fragment.supersededBy && " superseded"));
}
