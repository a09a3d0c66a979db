// The controls that choose several memories: paths, prefixes or labels, each with a weight.

import { append, h } from "./dom.js";

const KINDS = [["memory", "memory"], ["prefix", "prefix"], ["labels", "labels"]];
const EXAMPLES = { memory: "namespace/memory", prefix: "namespace/ or namespace/begin", labels: "key=value, …" };
const SCOPES_MAX = 100; // RecallQuery.scopes

/** The memory of a path "namespace/memory". */
export function memoryOf(path) {
  const at = path.indexOf("/");
  return { namespace: path.slice(0, at), memory: path.slice(at + 1) };
}

export const pathOf = ({ namespace, memory }) => `${namespace}/${memory}`;

/**
 * Rows of controls, one for each scope. Their values are one hidden control `scopes`, which forms keep in the address: a
 * line for each scope, "KIND WEIGHT TEXT". `usual` is the path that a first row begins with.
 */
export class Scopes {
  constructor(usual, label) {
    this.usual = usual;
    this.rows = h("div", { role: "group", "aria-label": label });
    // A hidden control changes its default with its value.
    this.kept = h("input", { type: "hidden", name: "scopes", value: "", "data-always": "" });
    this.more = h("button", { type: "button", onclick: () => this.add() }, label);
    this.root = h("div", { class: "scopes" }, this.kept, this.rows, this.more);
  }

  /** Draws the rows of the hidden control, after a form was filled in. */
  restore() {
    this.rows.replaceChildren();
    for (const line of this.kept.value.split("\n").filter(Boolean)) {
      const [, kind, weight, text] = line.match(/^(memory|prefix|labels) (\S*) (.*)$/) ?? ["", "memory", "", line];
      this.draw(kind, text, weight);
    }
    this.keep();
  }

  /** Adds a row; the first one comes after one with the usual memory. */
  add() {
    if (!this.rows.children.length && this.usual) this.draw("memory", this.usual, "");
    this.draw("memory", "", "").focus();
    this.keep();
  }

  draw(kind, text, weight) {
    const which = h("select", { "aria-label": "Kind" }, KINDS.map(([value, label]) => h("option", { value }, label)));
    which.value = kind;
    const input = h("input", { type: "text", autocomplete: "off", spellcheck: "false", required: true, placeholder: EXAMPLES[kind], "aria-label": "Memories" });
    input.value = text;
    const factor = h("input", { type: "number", min: 0, max: 100, step: "any", placeholder: "1", "aria-label": "Weight" });
    factor.value = weight;
    const row = h("div", { class: "bar" }, which, input, h("label", { class: "field" }, h("span", null, "weight"), factor),
      h("button", { type: "button", class: "link", "aria-label": "Remove these memories", onclick: () => { row.remove(); this.keep(); this.more.focus(); } }, "remove"));
    row.addEventListener("input", () => {
      input.placeholder = EXAMPLES[which.value];
      this.keep();
    });
    append(this.rows, row);
    return input;
  }

  /** Writes the rows into the hidden control. */
  keep() {
    const lines = [...this.rows.children].map((row) => {
      const [kind, text, weight] = row.querySelectorAll("select, input");
      return `${kind.value} ${weight.value} ${text.value.trim()}`;
    });
    this.kept.value = lines.join("\n");
    this.more.disabled = lines.length >= SCOPES_MAX;
  }

  /** The scopes of the contract; empty without rows. Throws an Error for labels that cannot be read. */
  read() {
    return [...this.rows.children].map((row) => {
      const [kind, text, weight] = row.querySelectorAll("select, input");
      const value = text.value.trim();
      const scope = kind.value === "labels" ? { labels: { labels: readLabels(value) } } : { [kind.value]: value };
      return weight.value ? { ...scope, weight: Number(weight.value) } : scope;
    });
  }
}

function readLabels(text) {
  return Object.fromEntries(text.split(",").map((pair) => {
    const [, key, value] = pair.trim().match(/^([^=]+)=(.*)$/s) ?? [];
    if (key === undefined) throw new Error("A label is written as key=value; a comma separates several.");
    return [key, value];
  }));
}
