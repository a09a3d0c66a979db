// The server: version, models and their use, limits.

import { call } from "../api.js";
import { facts, h, notify, show, table, visible } from "../dom.js";
import { bytes, count, enumName, time } from "../format.js";
import { drawSpending } from "../spending.js";
import { pause } from "../watch.js";

const POLL_MS = 5_000;
const IN_BYTES = /Bytes/;
const USE_HEADS = [["Requests", "number"], ["Failed", "number"], ["Prompt tokens", "number"], ["Completion tokens", "number"]];

export async function render({ place, signal }) {
  show(place, draw(await call("ServerService/GetServerInfo", {}, signal)));
  poll(place, signal);
}

async function poll(place, signal) {
  while (!signal.aborted) {
    await pause(POLL_MS, signal);
    if (document.hidden || signal.aborted) continue;
    try {
      const drawn = draw(await call("ServerService/GetServerInfo", {}, signal));
      const opened = [...place.querySelectorAll("details[open]")].map((each) => each.id);
      show(place, drawn);
      for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
      notify("");
    } catch (error) {
      if (!signal.aborted) notify(error.message, "bad");
    }
  }
}

function draw(info) {
  const capabilities = (info.capabilities ?? []).map((each) => h("span", { class: "label" }, enumName(each, "CAPABILITY_")));
  const limits = Object.entries(info.limits ?? {}).map(([name, value]) => [nameOf(name), valueOf(name, value)]);
  return [
    h("p", { class: info.degraded ? "mark warn" : "mark good" }, info.degraded ? `degraded: ${visible(info.degraded)}` : "answers are complete"),
    facts([
      ["version", info.version],
      ["started", time(info.startTime)],
      ["journal", info.journal],
      ["vector index", info.index],
      ["embedding", `${info.embedding?.name ?? ""}, ${count(info.embedding?.dimension)} dimensions`],
      ["importance scorer", info.scorerModel || "none"],
      ["insight model", info.insightModel || "none"],
      ["capabilities", h("span", { class: "labels" }, capabilities)],
    ]),
    h("h2", null, "Models"), drawModels(info.models ?? []),
    h("h2", null, "Use of models since the start"), drawUse(info.modelUsage ?? []),
    h("details", { class: "box", id: "limits" }, h("summary", null, "Limits"), facts(limits)),
  ];
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
