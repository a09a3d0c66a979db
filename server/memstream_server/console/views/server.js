// The server: version, models and their use, limits; RAM, disk, calls and settings for who may see them.

import { call } from "../api.js";
import { facts, h, notify, show, table, visible } from "../dom.js";
import { bytes, count, enumName, time } from "../format.js";
import { rightsIn } from "../session.js";
import { drawSpending } from "../spending.js";
import { pause } from "../shared_stream.js";

const POLL_MS = 5_000;
const CAPABILITIES = ["watch", "conversations", "lifecycle", "erase", "export", "operations", "reflection", "subscribe"];
const IN_BYTES = /Bytes/;
const USE_HEADS = [["Requests", "number"], ["Failed", "number"], ["Prompt tokens", "number"], ["Completion tokens", "number"]];

export async function render({ place, signal }) {
  const page = new ServerPage(place, signal);
  await page.read();
  page.poll();
}

class ServerPage {
  constructor(place, signal) {
    Object.assign(this, { place, signal, before: null });
  }

  async read() {
    const info = await call("ServerService/GetServerInfo", {}, this.signal);
    const everywhere = await rightsIn("");
    const status = everywhere.has("admin") ? await call("ServerService/GetServerStatus", {}, this.signal) : null;
    const opened = [...this.place.querySelectorAll("details[open]")].map((each) => each.id);
    show(this.place, draw(info, status, this.before));
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    this.before = status ?? this.before;
  }

  async poll() {
    while (!this.signal.aborted) {
      await pause(POLL_MS, this.signal);
      if (document.hidden || this.signal.aborted) continue;
      try {
        await this.read();
        notify("");
      } catch (error) {
        if (!this.signal.aborted) notify(error.message, "bad");
      }
    }
  }
}

function draw(info, status, before) {
  const has = new Set((info.capabilities ?? []).map((each) => enumName(each, "CAPABILITY_")));
  const capabilities = [...new Set([...CAPABILITIES, ...has])].map((name) => h("span", { class: has.has(name) ? "mark good" : "label" }, has.has(name) ? name : `no ${name}`));
  const limits = Object.entries(info.limits ?? {}).map(([name, value]) => [nameOf(name), valueOf(name, value)]);
  return [
    h("p", { class: info.degraded ? "mark warn" : "mark good" }, info.degraded ? `degraded: ${visible(info.degraded)}` : "answers are complete"),
    facts([
      ["version", info.version],
      ["started", [time(info.startTime), ` (${sinceOf(info.startTime)} ago)`]],
      ["journal", info.journal],
      ["vector index", info.index],
      ["embedding", `${info.embedding?.name ?? ""}, ${count(info.embedding?.dimension)} dimensions`],
      ["importance scorer", info.scorerModel || "none"],
      ["insight model", info.insightModel || "none"],
      ["capabilities", h("span", { class: "labels" }, capabilities)],
    ]),
    status ? drawStatus(status, before) : h("p", { class: "quiet" }, "What the server uses, its calls and its settings need the right admin in every namespace."),
    h("h2", null, "Models"), drawModels(info.models ?? []),
    h("h2", null, "Use of models since the start"), drawUse(info.modelUsage ?? []),
    h("details", { class: "box", id: "limits" }, h("summary", null, "Limits"), facts(limits)),
    status && drawSettings(status.settings ?? []),
  ];
}

/** The time since then, in its two largest units. */
function sinceOf(value) {
  let rest = Math.max(0, Math.round((Date.now() - new Date(value)) / 1_000));
  const parts = [["d", 86_400], ["h", 3_600], ["min", 60], ["s", 1]].map(([unit, size]) => {
    const whole = Math.floor(rest / size);
    rest -= whole * size;
    return whole ? `${whole} ${unit}` : "";
  }).filter(Boolean);
  return parts.slice(0, 2).join(" ") || "0 s";
}

/** The rate of a count since the status before, a second. */
function rateOf(name, status, before) {
  if (!before) return "";
  const elapsed = (new Date(status.readTime) - new Date(before.readTime)) / 1_000;
  return elapsed > 0 ? ` · ${((Number(status[name] ?? 0) - Number(before[name] ?? 0)) / elapsed).toFixed(1)} a second` : "";
}

function drawStatus(status, before) {
  const { residentBytes, machineBytes, dataBytes, diskFreeBytes, diskTotalBytes, streams = [] } = status;
  const busy = before ? (status.cpuSeconds - before.cpuSeconds) / ((new Date(status.readTime) - new Date(before.readTime)) / 1_000) : null;
  const open = streams.map(({ rpc, streams: number }) => `${count(number)} ${rpc}`).join(", ");
  return h("section", { "aria-label": "Use" }, h("h2", null, "Use"), h("div", { class: "columns" },
    facts([
      ["RAM", [`${bytes(residentBytes)} of ${bytes(machineBytes)} `, shareOf(residentBytes, machineBytes, "RAM")]],
      ["CPU", `${Number(status.cpuSeconds ?? 0).toFixed(1)} s since the start${busy === null ? "" : `, ${Math.round(100 * busy)} % of a core now`}`],
      ["data directory", bytes(dataBytes)],
      ["disk", [`${bytes(diskFreeBytes)} free of ${bytes(diskTotalBytes)} `, shareOf(Number(diskTotalBytes ?? 0) - Number(diskFreeBytes ?? 0), diskTotalBytes, "disk")]],
    ]), facts([
      ["observations stored", `${count(status.observations)}${rateOf("observations", status, before)}`],
      ["recalls", `${count(status.recalls)}${rateOf("recalls", status, before)}`],
      ["open streams", open || "none"],
      ["producers held", count(status.producers)],
      ["watches and standing queries", count(status.watchers)],
    ]), facts([
      ["memories in RAM", `${count(status.activeMemories)}, ${bytes(status.activeBytes)}`],
      ["not stored yet", count(status.backlog)],
      ["not indexed yet", count(status.outbox)],
    ])), h("h2", null, "Clients"), drawClients(status.clients ?? []), h("h2", null, "Calls since the start"), drawRpcs(status, before));
}

function shareOf(part, whole, name) {
  return Number(whole ?? 0) ? h("meter", { min: 0, max: 1, high: 0.9, value: Number(part ?? 0) / Number(whole), "aria-label": `${name} in use` }) : null;
}

function drawClients(clients) {
  if (!clients.length) return h("p", { class: "empty" }, "none yet");
  const rows = clients.map((one) => h("tr", null, h("th", { scope: "row", class: "text" }, visible(one.name) || h("span", { class: "quiet" }, "says no name")), h("td", null, visible(one.principal ?? "") || h("span", { class: "quiet" }, "none")),
    h("td", null, visible(one.address ?? "")), h("td", { class: "number" }, count(one.streams)), h("td", { class: "number" }, count(one.calls)), h("td", null, time(one.firstCallTime)), h("td", null, time(one.lastCallTime))));
  return table("Clients", ["Client, as it says", "Identity", "Address", ["Open streams", "number"], ["Calls", "number"], "First call", "Last call"], h("tbody", null, rows), "clients");
}

function drawRpcs({ rpcs = [], readTime }, before) {
  if (!rpcs.length) return h("p", { class: "empty" }, "none yet");
  const former = new Map((before?.rpcs ?? []).map((one) => [one.rpc, one]));
  const elapsed = before ? (new Date(readTime) - new Date(before.readTime)) / 1_000 : 0;
  const rate = (one) => (elapsed > 0 ? ((Number(one.calls ?? 0) - Number(former.get(one.rpc)?.calls ?? 0)) / elapsed).toFixed(1) : "");
  const ms = (duration) => (duration === undefined ? "" : `≤ ${Number((1_000 * parseFloat(duration)).toPrecision(3))}`);
  const rows = rpcs.map((one) => h("tr", null, h("th", { scope: "row" }, one.rpc), h("td", { class: "number" }, count(one.calls)), h("td", { class: "number" }, rate(one)),
    h("td", { class: `number${Number(one.failed ?? 0) ? " warn" : ""}` }, count(one.failed)), h("td", { class: "number" }, ms(one.median)), h("td", { class: "number" }, ms(one.p99))));
  return table("Calls", ["Call", ["Ended", "number"], ["A second", "number"], ["Failed", "number"], ["Median, ms", "number"], ["99 of 100, ms", "number"]], h("tbody", null, rows), "calls");
}

function drawSettings(settings) {
  const rows = settings.map(({ name, value = "", given: set = false }) => h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "text" }, visible(value) || h("span", { class: "quiet" }, "empty")),
    h("td", { class: "short" }, h("span", { class: set ? "mark good" : "quiet" }, set ? "set" : "default"))));
  return h("details", { class: "box", id: "settings" }, h("summary", null, `Settings (${count(settings.filter((one) => one.given).length)} set)`),
    table("Settings", ["Setting", "Value", "From"], h("tbody", null, rows), "settings"));
}

function drawModels(models) {
  if (!models.length) return h("p", { class: "empty" }, "none");
  const rows = models.map((model) => h("tr", null, h("th", { scope: "row" }, model.role), h("td", null, visible(model.model)),
    h("td", null, h("span", { class: `mark${model.state === "MODEL_STATE_FAILING" ? " warn" : ""}` }, enumName(model.state, "MODEL_STATE_"))),
    h("td", null, time(model.lastSuccessTime)), h("td", null, time(model.lastFailureTime)),
    h("td", { class: "number" }, count(model.consecutiveFailures)), h("td", null, visible(model.lastError))));
  return table("Models", ["Role", "Model", "State", "Last success", "Last failure", ["Failures in a row", "number"], "Last error"], h("tbody", null, rows));
}

function drawUse(used) {
  if (!used.length) return h("p", { class: "empty" }, "none, or not shown: it sums up all tenants, so it needs the right to read every namespace");
  return drawSpending("Use of models", [["Role", "role"], ["Model", "model"]], used, ["requests", "failed", "promptTokens", "completionTokens"], USE_HEADS);
}

const nameOf = (name) => name.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);

function valueOf(name, value) {
  if (typeof value === "string" && value.endsWith("s")) return `${count(value.slice(0, -1))} s`;
  return IN_BYTES.test(name) ? bytes(value) : count(value);
}
