// The address: #/PATH?QUERY. It has the view, its filters and the page, so that a link shows the same again.

import { timeOf } from "./times.js";

/** The address as parts and query: #/m/a/b/live?x=1. */
export function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s, 2);
  const parts = path.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { parts, query: new URLSearchParams(query) };
}

/** The address of this view with another query. */
export function hrefOf(query) {
  const path = location.hash.split("?", 1)[0] || "#/";
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** Changes the query of the address: null removes a name, `more` adds pairs. The former address stays behind Back. */
export function remember(changes, state = null, more = []) {
  const { query } = readAddress();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  for (const [name, value] of more) query.append(name, value);
  const next = hrefOf(query);
  if (next !== location.hash) history.pushState(state, "", next);
}

const controlsOf = (form) => [...form.elements].filter((control) => control.name && control.dataset.secret === undefined);

/** Fills in the controls of a form from a query; `prefix` is that of their names there. */
export function restoreForm(form, query, prefix = "") {
  for (const control of controlsOf(form)) {
    const value = query.get(prefix + control.name);
    if (value === null) continue;
    if (control.type === "checkbox") control.checked = value === "1";
    else if (control.dataset.time) control.value = form.elements.zone ? value : toLocal(value);
    else control.value = value;
  }
}

/** The controls of a form that differ from their defaults, as changes of a query; the others are null. */
export function readForm(form, prefix = "") {
  return Object.fromEntries(controlsOf(form).map((control) => [prefix + control.name, valueOf(control)]));
}

function valueOf(control) {
  if (control.type === "checkbox") return control.checked === control.defaultChecked ? null : String(Number(control.checked));
  if (control.dataset.time) return momentOf(control);
  const usual = control.tagName === "SELECT" ? control.dataset.default : control.defaultValue;
  return control.value === usual && control.dataset.always === undefined ? null : control.value;
}

/** A moment, so that a link means the same tomorrow and elsewhere. What is no time stays as it is: the view says so. */
function momentOf(control) {
  try {
    return timeOf(control);
  } catch {
    return control.value;
  }
}

/** A time with its zone as the value of a control, which has the zone of the browser. */
function toLocal(value) {
  const moment = new Date(value);
  if (Number.isNaN(moment.getTime())) return value;
  return new Date(moment.getTime() - 60_000 * moment.getTimezoneOffset()).toISOString().slice(0, 19);
}
