// The router: the part of the address after # names the view. It also signs in and out.

import { readAddress } from "./address.js";
import { beginRecord, isHeaderText, keepsKey, whenRefused } from "./api.js";
import { copyBox } from "./copies.js";
import { field, given, h, notify, show } from "./dom.js";
import { begin, caller, rightsIn, signedIn, signIn, signOut } from "./session.js";
import { link } from "./format.js";
import * as blocks from "./views/blocks.js";
import * as browse from "./views/browse.js";
import * as conflicts from "./views/conflicts.js";
import * as context from "./views/context.js";
import * as conversations from "./views/conversations.js";
import * as desk from "./views/recall.js";
import * as fragment from "./views/fragment.js";
import * as live from "./views/live.js";
import * as memories from "./views/memories.js";
import * as operations from "./views/operations.js";
import * as overview from "./views/overview.js";
import * as policy from "./views/policy.js";
import * as queries from "./views/queries.js";
import * as receipts from "./views/receipts.js";
import * as server from "./views/server.js";
import * as sessions from "./views/sessions.js";
import * as timeline from "./views/timeline.js";

// Views of one memory.
const OF_MEMORY = [
  ["browse", "Browse", browse],
  ["live", "Live", live],
  ["recall", "Recall", desk],
  ["context", "Context", context],
  ["sessions", "Sessions", sessions],
  ["timeline", "Timeline", timeline],
  ["conflicts", "Conflicts", conflicts],
  ["blocks", "Blocks", blocks],
  ["receipts", "Receipts", receipts],
  ["queries", "Standing queries", queries],
  ["policy", "Policy", policy],
];
const TOP = [
  ["", "Overview", overview],
  ["memories", "Memories", memories],
  ["conversations", "Conversations", conversations],
  ["operations", "Operations", operations],
  ["server", "Server", server],
];

const RECOUNT_MS = 300; // after the last change of several
const RETRY_MS = 2_000;
const main = document.getElementById("main");
const nav = document.getElementById("nav");
const account = document.getElementById("account");
let open = new AbortController();
let asksForKey = false;

function find({ parts, query }) {
  if (parts[0] === "namespace") {
    query.set("namespace", parts[1] ?? "");
    return { view: memories, title: "Memories", parts: [], query, memory: null };
  }
  if (parts[0] !== "m") {
    const [, title, view] = TOP.find(([name]) => name === (parts[0] ?? "")) ?? TOP[0];
    return { view, title, parts: parts.slice(1), query, memory: null };
  }
  const memory = { namespace: parts[1] ?? "", memory: parts[2] ?? "" };
  if (parts[3] === "fragment") return { view: fragment, title: "Fragment", parts: parts.slice(4), query, memory };
  const [, title, view] = OF_MEMORY.find(([name]) => name === (parts[3] ?? "browse")) ?? OF_MEMORY[0];
  return { view, title, parts: parts.slice(4), query, memory };
}

function drawNavigation(current) {
  const item = (href, label, here) => h("a", { href, "aria-current": here && "page" }, label);
  show(nav, TOP.map(([name, label, view]) => item(name ? link(name) : "#/", label, view === current.view)));
  drawAccount();
}

function drawAccount() {
  show(account, caller() && given(caller(), "caller"), signedIn() && h("button", {
    type: "button",
    class: "link",
    onclick: () => { signOut(); start(); },
  }, "Sign out"));
}

function drawHeading(found) {
  const { memory, view } = found;
  if (!memory) return h("h1", { tabindex: "-1" }, found.title);
  const base = ["m", memory.namespace, memory.memory];
  return h("div", { class: "heading" },
    h("h1", { tabindex: "-1" }, h("a", { href: link("namespace", memory.namespace) }, memory.namespace), " / ",
      h("a", { href: link(...base) }, memory.memory)),
    h("nav", { class: "tabs", "aria-label": "Memory" }, OF_MEMORY.map(([name, label, each]) =>
      h("a", { href: link(...base, name), "aria-current": each === view && "page", "data-view": name }, label))));
}

/** Adds the number of open suspicions to the link; without it if it cannot be read, which the view itself reports. */
async function drawOpenConflicts(heading, memory, signal) {
  if (signal.aborted) return;
  try {
    if (!(await rightsIn(memory.namespace)).has("read")) return;
    const count = await conflicts.countOpen(memory, signal);
    show(heading.querySelector("[data-view=conflicts]"), "Conflicts", count && [" ", h("span", { class: "mark warn" }, `${count} open`)]);
  } catch {
    // The view reports a server that does not answer.
  }
}

/** Draws the view of the address; the former one ends. */
async function draw(moved) {
  open.abort();
  open = new AbortController();
  const { signal } = open;
  asksForKey = false;
  beginRecord();
  const found = find(readAddress());
  document.title = `${found.memory ? `${found.memory.namespace}/${found.memory.memory} · ` : ""}${found.title} · memstream`;
  drawNavigation(found);
  const heading = drawHeading(found);
  const place = h("div", { class: "view", "aria-busy": "true" });
  show(main, heading, place, copyBox());
  notify("");
  if (found.memory) {
    let waiting = 0;
    place.addEventListener("conflicts", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => drawOpenConflicts(heading, found.memory, signal), RECOUNT_MS);
    });
    drawOpenConflicts(heading, found.memory, signal);
  }
  if (moved) main.querySelector("h1").focus({ preventScroll: true });
  try {
    await found.view.render({ place, signal, ...found });
  } catch (error) {
    if (!signal.aborted) showFailure(place, error, signal);
  } finally {
    place.removeAttribute("aria-busy");
  }
}

/** Shows the error of a view. A server that does not answer is asked again. */
function showFailure(place, error, signal) {
  if (error.code === "unauthenticated") return; // the form is shown
  if (error.code === undefined) console.error(error); // a defect of the page
  const away = error.code === "unavailable";
  show(place, h("div", { class: "failure", role: "alert" },
    h("p", null, error.message), error.reason && h("p", { class: "quiet" }, error.reason),
    away && h("p", { class: "quiet" }, "The page asks again every two seconds."),
    h("button", { type: "button", onclick: () => start() }, "Try again")));
  if (!away) return;
  const timer = setTimeout(() => start(), RETRY_MS);
  signal.addEventListener("abort", () => clearTimeout(timer));
}

/** Asks for a key in place of the view; the view of the address follows. */
function drawSignIn(reason) {
  if (asksForKey) return;
  asksForKey = true;
  open.abort();
  const revoked = signedIn();
  signOut();
  show(nav);
  show(account);
  document.title = "Sign in · memstream";
  const input = h("input", { type: "password", name: "key", autocomplete: "off", spellcheck: "false", required: true });
  const keep = h("input", { type: "checkbox", name: "keep", checked: keepsKey, disabled: !keepsKey });
  const problem = h("p", { class: "problem", role: "alert" });
  const submit = h("button", { type: "submit", class: "main" }, "Sign in");
  const form = h("form", { class: "sign-in" }, h("h1", null, "Sign in"),
    h("p", null, "This server needs an API key or a token. No address has it."), field("API key", input),
    h("label", { class: "check" }, keep, "keep it in this tab when the page is loaded again"),
    !keepsKey && h("p", { class: "quiet" }, isSecureContext ? "This page shares its origin with others, which could read a kept key: loading it again forgets the key."
      : "This page came over plain HTTP from another machine: loading it again forgets the key."),
    submit, problem);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = input.value.trim();
    if (!isHeaderText(key)) return show(problem, "A key consists of printable ASCII characters without spaces.");
    submit.disabled = true;
    try {
      await signIn(key, keep.checked);
      input.value = "";
      draw(true);
    } catch (error) {
      show(problem, error.message);
    } finally {
      submit.disabled = false;
    }
    return undefined;
  });
  show(main, form);
  if (revoked) show(problem, `The server no longer takes this key: ${reason}`);
  input.focus();
}

/** Draws the view while it asks who calls; a call that is refused for lack of a key shows the form. */
async function start() {
  const [known] = await Promise.allSettled([begin(), draw(false)]);
  if (known.status === "fulfilled" && !asksForKey) drawAccount();
}

whenRefused((error) => drawSignIn(error.message));
window.addEventListener("hashchange", () => draw(true));
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  main.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, [contenteditable]")) return;
  const first = main.querySelector("input[type=search], textarea");
  if (first) {
    event.preventDefault();
    first.focus();
  }
});
start();
