// The policy of a memory, each value with where it comes from; its labels; and what is done with the whole memory.

import { call, stream } from "../api.js";
import { action, append, confirmed, download, field, given, h, notify, select, show, table, visible } from "../dom.js";
import { count, enumName, link, time } from "../format.js";
import { rightsIn } from "../session.js";

const TIERS = [["TIER_SENSORY", "sensory"], ["TIER_SHORT_TERM", "short-term"], ["TIER_LONG_TERM", "long-term"]];

export async function render({ place, signal, memory }) {
  const rights = await rightsIn(memory.namespace);
  const page = new PolicyPage(place, memory, rights, signal);
  await page.read();
}

class PolicyPage {
  constructor(place, memory, rights, signal) {
    Object.assign(this, { place, memory, rights, signal });
  }

  async read() {
    const { memory, policyFields = [] } = await call("MemoryService/GetMemory", { ...this.memory, describePolicy: true }, this.signal);
    this.described = memory;
    show(this.place, this.drawMemory(), this.drawLabels(), this.drawWhole(), h("h2", null, "Policy"), this.drawFields(policyFields));
  }

  drawMemory() {
    const { kind, uid, revision, createTime, updateTime, etag, policy = {} } = this.described;
    return h("p", { class: "numbers" }, [["kind", enumName(kind, "MEMORY_KIND_")], ["profile", enumName(policy.profile, "PROFILE_")], ["revision", count(revision)],
      ["created", time(createTime)], ["changed", time(updateTime)], ["uid", h("code", null, uid)], ["etag", h("code", null, etag ?? "")]].map(([name, value]) => h("span", null, `${name} `, h("b", null, value))));
  }

  drawLabels() {
    const labels = Object.entries(this.described.labels ?? {});
    if (!this.rights.has("admin")) {
      return h("section", null, h("h2", null, "Labels"), labels.length ? h("p", { class: "labels" }, labels.map(([name, value]) => given(`${name}=${value}`, "label"))) : h("p", { class: "empty" }, "none"));
    }
    const text = h("textarea", { name: "labels", rows: Math.max(2, labels.length + 1), spellcheck: "false", "aria-label": "Labels, one key=value in each line" });
    text.value = labels.map(([name, value]) => `${name}=${value}`).join("\n");
    return h("section", null, h("h2", null, "Labels"), text, h("div", { class: "bar" }, action("Save the labels", () => this.update({ labels: readLabels(text.value) }, "labels"), "main"),
      h("span", { class: "quiet" }, "key=value, one in each line")));
  }

  /** What concerns the whole memory. */
  drawWhole() {
    const { rights } = this;
    const path = `${this.memory.namespace}/${this.memory.memory}`;
    const tier = select("tier", TIERS, "TIER_SENSORY");
    tier.setAttribute("aria-label", "Tier to clear");
    const started = async (method, request, what) => {
      await call(method, { ...this.memory, ...request, requestId: crypto.randomUUID?.() }, this.signal);
      show(document.getElementById("notice"), h("p", null, `${what} has started: `, h("a", { href: link("operations") }, "operations"), " shows it."));
    };
    const whole = h("section", null, h("h2", null, "The whole memory"), h("div", { class: "bar" },
      rights.has("read") && action("Export", (event) => this.export(event)),
      rights.has("write") && action("Reflect", () => started("MemoryService/ReflectMemory", {}, "The reflection")),
      rights.has("forget") && action("Purge", () => started("OperationService/StartPurge", {}, "The purge")),
      rights.has("forget") && [tier, action("Clear this tier …", async () => {
        const name = enumName(tier.value, "TIER_");
        if (!(await confirmed(`Empty ${name} of ${path} for good, forgotten fragments included.`, name))) return;
        const { cleared } = await call("MemoryService/ClearMemory", { ...this.memory, tiers: [tier.value], requestId: crypto.randomUUID?.() }, this.signal);
        notify(`${count(cleared)} fragments are gone.`);
      }, "danger")],
      rights.has("forget") && action("Delete the memory …", async () => {
        if (!(await confirmed(`Delete ${path} with all of its content, for good.`, this.memory.memory))) return;
        await call("MemoryService/DeleteMemory", { ...this.memory, requestId: crypto.randomUUID?.() }, this.signal);
        location.hash = link("namespace", this.memory.namespace);
      }, "danger")),
    h("p", { class: "quiet" }, "Reflect derives insights now. Purge erases forgotten fragments past their grace period now."));
    if (rights.has("write")) append(whole, [this.drawClone()]);
    return whole;
  }

  drawClone() {
    const name = h("input", { name: "clone", type: "text", autocomplete: "off", required: true });
    const form = h("form", { class: "bar" }, field("Clone its kind and policy as", name), h("button", { type: "submit" }, "Clone"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      try {
        const { memory } = await call("MemoryService/CloneMemory", { ...this.memory, newMemory: name.value.trim(), requestId: crypto.randomUUID?.() }, this.signal);
        location.hash = link("m", memory.namespace, memory.name, "policy");
      } catch (error) {
        if (!this.signal.aborted) notify(error.message, "bad");
      }
    });
    return form;
  }

  /** Saves the JSON lines of an export, which `memstream import` reads. */
  async export() {
    const parts = [];
    for await (const { lines = "", done, total } of stream("MemoryService/ExportMemories", this.memory, this.signal)) {
      parts.push(Uint8Array.from(atob(lines), (char) => char.charCodeAt(0)));
      notify(`${count(done)} of ${count(total)} fragments are read.`);
    }
    download(`${this.memory.namespace}-${this.memory.memory}.jsonl`, parts);
    notify("The export is saved. memstream import reads it.");
  }

  drawFields(fields) {
    const may = this.rights.has("admin");
    const groups = new Map();
    for (const one of fields) {
      const [, group, rest] = one.path.match(/^policy\.(?:([a-z_]+)\.)?([a-z_]+)$/) ?? [null, "", one.path];
      groups.set(group ?? "", [...(groups.get(group ?? "") ?? []), { ...one, name: rest }]);
    }
    const rows = [...groups].flatMap(([group, members]) => members.map((one) => this.drawField(one, group, may && one.name !== "profile")));
    return table("Policy", ["Field", "Value", "From", "Default", "Meaning"], h("tbody", null, rows), "policy");
  }

  drawField(one, group, may) {
    const same = (one.value ?? "") === (one.defaultValue ?? "");
    const cell = h("td", { class: "value" });
    const row = h("tr", { "data-path": one.path }, h("th", { scope: "row" }, group && h("span", { class: "quiet" }, `${group}.`), one.name), cell,
      h("td", { class: "short" }, h("span", { class: same ? "quiet" : "mark good" }, same ? "profile" : "set here")), h("td", null, shortOf(one.defaultValue) || h("span", { class: "quiet" }, "the model's own")),
      h("td", { class: "meaning quiet" }, visible(one.meaning), one.unit && ` (${one.unit})`));
    const idle = () => show(cell, h("b", null, shortOf(one.value) || "the model's own"), may && [" ", h("button", { type: "button", class: "link", "aria-label": `Change ${one.path}`, onclick: edit }, "change")]);
    const edit = () => {
      const input = controlOf(one);
      show(cell, h("form", { class: "bar", onsubmit: (event) => { event.preventDefault(); this.save(one, input.value.trim()); } }, input, h("button", { type: "submit", class: "main" }, "Save"),
        !same && h("button", { type: "button", onclick: () => this.save(one, "") }, "Default"), h("button", { type: "button", onclick: idle }, "Cancel")));
      input.focus();
    };
    idle();
    return row;
  }

  /** Sets a field; an empty text gives it the profile's value again. */
  async save(one, text) {
    const parts = one.path.split(".").slice(1);
    const policy = {};
    let at = policy;
    for (const part of parts.slice(0, -1)) at = at[part] = {};
    if (text !== "") at[parts.at(-1)] = readValue(one, text);
    await this.update({ policy }, one.path);
  }

  async update(changes, updateMask) {
    const { namespace, name, etag } = this.described;
    try {
      // The JSON form writes the paths of a mask in camel case.
      const mask = updateMask.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());
      await call("MemoryService/UpdateMemory", { memory: { namespace, name, etag, ...changes }, updateMask: mask, requestId: crypto.randomUUID?.() }, this.signal);
      await this.read();
      notify("Saved.");
    } catch (error) {
      if (this.signal.aborted) return;
      if (error.reason === "ETAG_MISMATCH") {
        await this.read();
        notify("Somebody changed the memory meanwhile; nothing was saved, and the page shows its present state.", "bad");
      } else notify(error.message, "bad");
    }
  }
}

function controlOf(one) {
  if (one.choices?.length) {
    const made = select(one.path, one.choices.map((each) => [each, shortOf(each)]), one.value ?? one.choices[0]);
    made.setAttribute("aria-label", one.path);
    return made;
  }
  const number = one.low !== undefined && !String(one.value).endsWith("s");
  const input = h("input", { name: one.path, type: number ? "number" : "text", min: one.low, max: one.high, step: "any", "aria-label": one.path, placeholder: shortOf(one.defaultValue) });
  input.value = one.value ?? "";
  return input;
}

/** An enum without its prefix, a duration with its unit; other values as they are. */
function shortOf(value = "") {
  if (/^[A-Z]+_[A-Z_]+$/.test(value)) return value.replace(/^(PROFILE|SHORT_TERM_KIND|SIMILARITY_RULE|OVERFLOW|RANKING_RULE|TRUTH)_/, "").toLowerCase().replaceAll("_", "-");
  if (/^\d+s$/.test(value)) return durationOf(Number(value.slice(0, -1)));
  return value;
}

function durationOf(seconds) {
  for (const [unit, size] of [["d", 86_400], ["h", 3_600], ["min", 60]]) if (seconds && seconds % size === 0) return `${count(seconds / size)} ${unit}`;
  return `${count(seconds)} s`;
}

/** The value of a field as JSON: a duration may have a unit. */
function readValue(one, text) {
  if (/^(true|false)$/.test(text) && one.choices?.length) return text === "true";
  if (String(one.defaultValue).match(/^\d+s$/)) {
    const [, number, unit = "s"] = text.match(/^(\d+)\s*(s|min|h|d)?$/) ?? [];
    if (number === undefined) throw new Error("A duration is a number with a unit: 30 s, 10 min, 12 h, 7 d.");
    return `${Number(number) * { s: 1, min: 60, h: 3_600, d: 86_400 }[unit]}s`;
  }
  return one.choices?.length || one.low === undefined ? text : Number(text);
}

function readLabels(text) {
  return Object.fromEntries(text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const [, key, value] = line.match(/^([^=]+)=(.*)$/s) ?? [];
    if (key === undefined) throw new Error(`A label is written as key=value, not ${line}.`);
    return [key.trim(), value];
  }));
}
