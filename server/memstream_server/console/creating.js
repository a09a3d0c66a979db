// A form that creates a memory.

import { call } from "./api.js";
import { field, h, select, show } from "./dom.js";
import { link } from "./format.js";

const KINDS = [["MEMORY_KIND_HYBRID", "hybrid: all three tiers"], ["MEMORY_KIND_LONG_TERM", "long-term: everything"], ["MEMORY_KIND_ENHANCED_SHORT_TERM", "enhanced short-term"],
  ["MEMORY_KIND_SHORT_TERM", "short-term: the last few"], ["MEMORY_KIND_SENSORY", "sensory: a buffer"]];
const PROFILES = [["PROFILE_DEFAULT", "default"], ["PROFILE_DBGPT", "as DB-GPT"]];

/** A box with the form; `open`: shown at once. The new memory is opened. */
export function createBox(namespace, signal, open = false) {
  const input = (name, value = "", more = {}) => h("input", { name, type: "text", value, autocomplete: "off", spellcheck: "false", ...more });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { class: "create" }, h("div", { class: "fields" }, field("Namespace", input("namespace", namespace, { required: true })), field("Name", input("memory", "", { required: true })),
    field("Kind", select("kind", KINDS, KINDS[0][0])), field("Profile", select("profile", PROFILES, PROFILES[0][0])), field("Labels", input("labels", "", { placeholder: "key=value, …" }))),
  h("div", { class: "bar" }, h("button", { type: "submit", class: "main" }, "Create the memory")), problem);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { elements } = form;
    const pairs = elements.labels.value.split(",").map((pair) => pair.trim()).filter(Boolean).map((pair) => pair.match(/^([^=]+)=(.*)$/s));
    if (pairs.includes(null)) return show(problem, "A label is written as key=value; a comma separates several.");
    const request = { namespace: elements.namespace.value.trim(), memory: elements.memory.value.trim(), kind: elements.kind.value, policy: { profile: elements.profile.value },
      labels: Object.fromEntries(pairs.map(([, key, value]) => [key, value])), requestId: crypto.randomUUID?.() };
    try {
      const { memory } = await call("MemoryService/CreateMemory", request, signal);
      location.hash = link("m", memory.namespace, memory.name);
      return undefined;
    } catch (error) {
      return signal.aborted ? undefined : show(problem, error.message);
    }
  });
  return h("details", { class: "box", open }, h("summary", null, "Create a memory"), form);
}
