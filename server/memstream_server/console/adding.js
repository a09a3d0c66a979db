// A form that observes: one fragment, with the attributes that a client may give.

import { call } from "./api.js";
import { field, h, notify, select, show } from "./dom.js";
import { readValues } from "./fragment_filter.js";
import { timeInput, timeOf } from "./times.js";

const ROLES = [["", "by speaker"], ["ROLE_USER", "user"], ["ROLE_ASSISTANT", "assistant"], ["ROLE_TOOL", "tool"], ["ROLE_SYSTEM", "system"]];

/** A box with the form. `added()` is called when the fragment is stored. */
export function addBox(memory, signal, added) {
  const input = (name, type = "text", more = {}) => h("input", { name, type, autocomplete: "off", ...more });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { class: "add" }, field("Content", h("textarea", { name: "content", rows: 2, required: true, dir: "auto" })),
    h("div", { class: "fields" }, field("Speaker", input("speaker")), field("Role", select("role", ROLES)), field("Session", input("session")),
      field("Importance", input("importance", "number", { min: 0, max: 1, step: "any", placeholder: "rated" })),
      field("Perceived", timeInput("when")), field("External id", input("externalId")), field("Metadata", input("metadata", "text", { placeholder: "key=value, …" }))),
    h("div", { class: "bar" }, h("button", { type: "submit", class: "main" }, "Add")), problem);
  const box = h("details", { class: "box" }, h("summary", null, "Add a fragment"), form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    show(problem);
    try {
      const { ack = {} } = await call("StreamService/ObserveBatch", { ...memory, observations: [readObservation(form.elements)], requestId: crypto.randomUUID?.() }, signal);
      const [rejected] = ack.rejected ?? [];
      if (rejected) return show(problem, rejected.status?.message ?? "It was rejected.");
      form.reset();
      await added();
      return notify("Added.");
    } catch (error) {
      return signal.aborted ? undefined : show(problem, error.message);
    }
  });
  return box;
}

function readObservation(elements) {
  const observation = { content: elements.content.value };
  for (const name of ["speaker", "role", "session", "externalId"]) if (elements[name].value.trim()) observation[name] = elements[name].value.trim();
  if (elements.importance.value) observation.importance = Number(elements.importance.value);
  if (elements.when.value.trim()) observation.observeTime = timeOf(elements.when);
  const pairs = elements.metadata.value.split(",").map((pair) => pair.trim()).filter(Boolean);
  if (pairs.length) observation.metadata = Object.fromEntries(pairs.map(readPair));
  return observation;
}

/** The most specific reading of a value: 3 is a number, "3 days" a text. */
function readPair(pair) {
  const [, key, value] = pair.match(/^([^=]+)=(.*)$/s) ?? [];
  if (key === undefined) throw new Error("Metadata is written as key=value; a comma separates several.");
  const values = readValues(value);
  return [key.trim(), values[Math.min(1, values.length - 1)]];
}
