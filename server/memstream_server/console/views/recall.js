// The recall desk: a query, its ranking with every score as the sum of its parts, and what is missing from it.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { action, clipped, field, given, h, hiddenMark, notify, select, show, table } from "../dom.js";
import { CONFLICT_REASONS, fragmentLink } from "../events.js";
import { drawUnmatched, filterFields, readFilter } from "../fragment_filter.js";
import { count, decimal, enumName, link, metadataValue, textOf, tierName, time, timeIn } from "../format.js";
import { textLater } from "../related.js";
import { memoryOf, pathOf, Scopes } from "../scopes.js";
import { bar, legend, partsTable, scaleOf } from "../score.js";
import { rightsIn } from "../session.js";
import { timeInput, timeOf } from "../times.js";
import { explainAbsence, findByText, STAGES } from "../why.js";

const NEAR_MISSES = 20;
const TRUTHS = [["", "by policy"], ["TRUTH_CURRENT", "current"], ["TRUTH_ALL", "all"]];
const CURRENT = "TRUTH_STATUS_CURRENT";

export async function render({ place, signal, memory, query }) {
  const rights = await rightsIn(memory.namespace);
  if (!rights.has("recall")) {
    return show(place, h("p", { class: "empty" }, "Your key does not have the right to recall in this namespace."));
  }
  const { limits } = await call("ServerService/GetServerInfo", {}, signal);
  const panes = h("div", { class: "panes" });
  const compare = h("button", { type: "button", "aria-pressed": "false" }, "Compare two queries");
  const first = new Pane(memory, limits, rights, signal, "1");
  let second = null;
  const compareWith = (pane) => {
    second?.root.remove();
    second = pane;
    if (pane) panes.append(pane.root);
    compare.setAttribute("aria-pressed", String(pane !== null));
  };
  compare.addEventListener("click", () => {
    const former = second;
    compareWith(former ? null : new Pane(memory, limits, rights, signal, "2"));
    if (second) second.copy(first);
    else remember(Object.fromEntries(Object.keys(readForm(former.form, "2.")).map((name) => [name, null])));
  });
  panes.append(first.root);
  show(place, h("div", { class: "bar" }, compare, h("span", { class: "quiet" }, rights.has("observe") ? "Asking here changes nothing, unless you let it reinforce." : "Asking here changes nothing.")), panes);
  first.form.elements.text.focus({ preventScroll: true });
  // A link, and Back, have the queries: they are asked again, and change nothing.
  if (query.get("2.text")) compareWith(new Pane(memory, limits, rights, signal, "2"));
  await Promise.all([[first, ""], [second, "2."]].map(([pane, prefix]) => pane?.restore(query, prefix)));
  return undefined;
}

/** One query and its answer. */
class Pane {
  constructor(memory, limits, rights, signal, name) {
    Object.assign(this, { memory, limits, mayReinforce: rights.has("observe"), mayWrite: rights.has("write"), signal, prefix: name === "1" ? "" : `${name}.` });
    this.answer = h("div", { class: "answer", "aria-live": "off" });
    this.scopes = new Scopes(pathOf(memory), "Ask several memories");
    this.status = h("p", { class: "away", role: "status" });
    this.form = this.drawForm();
    this.root = h("section", { class: "pane", "aria-label": `Query ${name}` }, this.form, this.status, this.answer);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      remember(readForm(this.form, this.prefix));
      this.ask();
    });
  }

  drawForm() {
    const input = (name, type, more) => h("input", { name, type, autocomplete: "off", ...more });
    const text = h("textarea", { name: "text", rows: 2, required: true, placeholder: "What does Bob drink?" });
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    const asOf = [timeInput("asOfTime"), input("asOfRevision", "number", { min: 1, placeholder: "now" })];
    // A moment is a time or a revision.
    asOf.forEach((one, place) => one.addEventListener("input", () => { if (one.value) asOf[1 - place].value = ""; }));
    return h("form", { class: "query" }, field("Query", text), this.scopes.root,
      h("div", { class: "fields" },
        field("Limit", input("limit", "number", { min: 1, max: this.limits.recallLimitMax, placeholder: "policy" })),
        field("Token budget", input("tokens", "number", { min: 1, placeholder: "none" })),
        field("Minimum relevance", input("relevance", "number", { min: 0, max: 1, step: "any", placeholder: "policy" })),
        field("Truth", select("truth", TRUTHS)), field("As of", asOf[0]), field("or revision", asOf[1]),
        field("Time zone", input("zone", "text", { value: browserZone(), placeholder: "UTC", spellcheck: "false", "data-always": "" }))),
      h("details", { class: "more" }, h("summary", null, "Filter and weights"),
        h("div", { class: "fields" }, filterFields(),
          [["alpha", "Weight of recency"], ["beta", "of relevance"], ["gamma", "of importance"]].map(([name, label]) => field(label, input(name, "number", { min: 0, max: 100, step: "any", placeholder: "policy" }))))),
      h("div", { class: "bar" },
        h("button", { type: "submit", class: "main" }, "Recall"),
        h("label", { class: "check" }, input("fold", "checkbox", { checked: true }), "fold repeats"),
        h("label", { class: "check", title: "of several memories: leave out those that do not exist or that you may not recall" }, input("partial", "checkbox"), "partial"),
        h("label", { class: "check" }, input("interpret", "checkbox", { checked: true }), "interpret phrases of time"),
        // No link reinforces: who opens it may not want to.
        this.mayReinforce && h("label", { class: "check" }, input("reinforce", "checkbox", { "data-secret": "" }), "reinforce")));
  }

  /** Takes the values of another pane. */
  copy(other) {
    for (const control of other.form.elements) {
      if (!control.name) continue;
      this.form.elements[control.name].value = control.value;
      if (control.type === "checkbox") this.form.elements[control.name].checked = control.checked;
    }
    this.scopes.restore();
  }

  /** Takes the query of an address, and asks it. */
  async restore(query, prefix) {
    restoreForm(this.form, query, prefix);
    this.scopes.restore();
    const [details] = this.form.getElementsByTagName("details");
    details.open = [...details.querySelectorAll("[name]")].some((control) => query.get(prefix + control.name));
    if (query.get(`${prefix}text`)) await this.ask();
  }

  /** The query of the form. Throws an Error for a filter that cannot be read. */
  readQuery() {
    const { elements } = this.form;
    const filter = readFilter(elements);
    const query = { text: elements.text.value, filter, explain: true, nearMisses: NEAR_MISSES, reinforce: Boolean(elements.reinforce?.checked) };
    if (!elements.fold.checked) query.fold = false;
    if (!elements.interpret.checked) query.interpretTime = false;
    if (elements.truth.value) query.truth = elements.truth.value;
    if (elements.zone.value.trim()) query.timeZone = elements.zone.value.trim();
    if (elements.asOfRevision.value) query.asOfRevision = elements.asOfRevision.value;
    else if (elements.asOfTime.value.trim()) query.asOfTime = timeOf(elements.asOfTime);
    if (elements.limit.value) query.limit = Number(elements.limit.value);
    if (elements.tokens.value) query.tokenBudget = Number(elements.tokens.value);
    if (elements.relevance.value) query.minRelevance = Number(elements.relevance.value);
    const weights = Object.fromEntries(["alpha", "beta", "gamma"].filter((name) => elements[name].value).map((name) => [name, Number(elements[name].value)]));
    if (Object.keys(weights).length) query.weights = weights;
    const scopes = this.scopes.read();
    if (scopes.length) Object.assign(query, { scopes, partial: elements.partial.checked });
    return query;
  }

  async ask() {
    let query;
    try {
      query = this.readQuery();
    } catch (error) {
      return show(this.answer, h("p", { class: "problem", role: "alert" }, error.message));
    }
    this.asked?.abort(); // a second query replaces the first
    const asked = new AbortController();
    this.asked = asked;
    const signal = AbortSignal.any([this.signal, asked.signal]);
    show(this.status, "asking");
    this.answer.setAttribute("aria-busy", "true");
    try {
      const began = performance.now();
      const answer = await call("StreamService/RecallOnce", query.scopes ? { query } : { ...this.memory, query }, signal);
      this.draw(answer, query, performance.now() - began);
    } catch (error) {
      if (signal.aborted) return undefined;
      show(this.status, "failed");
      return show(this.answer, h("p", { class: "problem", role: "alert" }, error.message));
    } finally {
      if (this.asked === asked) this.answer.removeAttribute("aria-busy");
    }
    return undefined;
  }

  draw({ recollections: parts = {}, done = {} }, query, elapsedMs) {
    const ranked = parts.recollections ?? [];
    const several = query.scopes !== undefined;
    const scale = scaleOf(ranked);
    show(this.status, `${ranked.length} recollections`);
    show(this.answer,
      this.drawSummary(done, ranked.length, elapsedMs),
      several ? drawMemories(done.memories ?? []) : drawUnmatched(done.unmatched),
      drawInterpreted(done.interpreted ?? [], query.timeZone),
      legend(ranked),
      ranked.length ? h("ol", { class: "ranking" }, ranked.map((each) => this.drawRecollection(each, scale)))
        : h("p", { class: "empty" }, several ? "Nothing in these memories answers the query." : "Nothing in this memory answers the query."),
      !several && this.drawWhy(query, ranked.length), // it asks one memory
      drawMisses(done.nearMisses ?? [], this.memory, this.signal, several ? null : (id) => this.explain(id)),
      this.drawWorking(parts, done.memories ?? []));
  }

  drawSummary(done, shown, elapsedMs) {
    const timings = Object.entries(done.timings ?? {}).map(([step, seconds]) => `${step} ${decimal(1_000 * seconds, 1)}`);
    return [
      done.weak && h("p", { class: "mark weak" }, "weak: the memory probably has nothing about this"),
      done.degraded && h("p", { class: "mark warn" }, `degraded: ${done.degraded}`),
      h("p", { class: "numbers summary" }, [
        ["recollections", `${count(shown)} of ${count(done.eligible)} eligible, ${count(done.considered)} scored`],
        ["best relevance", decimal(done.bestRelevance)],
        ["tokens", done.tokens ? count(done.tokens) : ""],
        ["revision", Number(done.revision ?? 0) ? count(done.revision) : ""],
        ["as of revision", Number(done.asOfRevision ?? 0) ? count(done.asOfRevision) : ""],
        ["server, ms", timings.join(" · ")],
        ["round trip, ms", decimal(elapsedMs, 0)],
      ].filter(([, value]) => value).map(([label, value]) => h("span", null, `${label} `, h("b", null, value)))),
    ];
  }

  /** `holder`: the memory of the fragment; a reply has that of its message. */
  drawRecollection(each, scale, holder = each.memory ? memoryOf(each.memory) : this.memory) {
    const { fragment } = each;
    const mayWrite = this.mayWrite && holder.namespace === this.memory.namespace; // what was asked is the right in that one
    const folded = each.foldedIds ?? [];
    return h("li", { "data-id": fragment.id },
      h("div", { class: "score" }, h("b", null, decimal(each.score)), bar(each, scale)),
      h("div", null, clipped(textOf(fragment))),
      h("p", { class: "quiet meta" }, fragmentLink(holder, fragment.id), each.memory && [" in ", memoryLink(each.memory)], fragment.speaker && [" · ", given(fragment.speaker)],
        ` · ${tierName(fragment.tier)} · `, time(fragment.observeTime), fragment.session && [" · ", given(fragment.session)],
        ` · relevance ${decimal(each.relevance)} · importance ${decimal(fragment.importance, 2)} `, drawMetadata(fragment), hiddenMark(fragment),
        each.status && each.status !== CURRENT && h("span", { class: "mark warn" }, statusName(each.status)),
        each.truncated && h("span", { class: "mark" }, "truncated")),
      drawChain(each, holder, this.signal),
      each.laterId && drawEarlier(each, holder, mayWrite, this.signal),
      (each.suspicions ?? []).map((suspicion) => drawSuspicion(suspicion, fragment.id, holder, this.signal)),
      folded.length > 0 && h("details", null, h("summary", null, h("span", { class: "mark" }, `folded ${count(folded.length)}`)),
        h("ul", null, folded.map((id) => h("li", null, fragmentLink(holder, id))))),
      h("details", { class: "explained" }, h("summary", null, "parts of the score"), partsTable(each)),
      each.companion && h("ul", { class: "companion", "aria-label": "reply" }, this.drawRecollection(each.companion, scale, holder)));
  }

  drawWhy(query, shown) {
    const input = h("input", { type: "text", name: "id", autocomplete: "off", spellcheck: "false", required: true });
    const result = h("div", { role: "status" });
    const form = h("form", { class: "why" }, field("Why not this one?", input, "its id, the end of its id, its external id, or a piece of its text; also of a forgotten one"),
      h("button", { type: "submit" }, "Explain"));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      show(result, "asking");
      try {
        const fragment = await findByText(this.memory, input.value.trim(), this.signal, momentOf(query));
        const found = await explainAbsence(this.memory, query, fragment, shown, this.limits.recallLimitMax, this.signal);
        this.drawReason(result, fragment, found);
      } catch (error) {
        if (!this.signal.aborted) show(result, h("p", { class: "problem" }, error.message));
      }
    });
    return h("section", { class: "box" }, form, result);
  }

  /** Fills in the id and explains it. */
  explain(id) {
    const form = this.answer.querySelector(".why");
    form.elements.id.value = id;
    form.requestSubmit();
    form.scrollIntoView({ block: "nearest" });
  }

  drawReason(result, fragment, { stage, rank, miss, foldedInto, recollection }) {
    const reason = stage === "" ? `It is in the answer, at place ${count(rank)}.`
      : `Removed by ${stage}: ${STAGES[stage] ?? "the server gives no further reason"}.`;
    const shown = recollection ?? { score: miss?.score };
    show(result, h("p", null, h("b", null, reason), rank && stage && ` It would be at place ${count(rank)}.`,
      foldedInto && [" It is folded into ", fragmentLink(this.memory, foldedInto), "."],
      miss?.supersededBy && [" It is superseded by ", fragmentLink(this.memory, miss.supersededBy), "."]),
      h("p", null, clipped(textOf(fragment), 200)),
      recollection ? [bar(shown, scaleOf([shown])), partsTable(recollection)]
        : h("p", { class: "quiet" }, shown.score === undefined ? "It was not scored." : `Its score is ${decimal(shown.score)}.`));
  }

  drawWorking(parts, memories) {
    const ids = parts.workingMemoryIds ?? [];
    if (!ids.length) return null;
    const holders = new Map(memories.flatMap((one) => (one.workingMemoryIds ?? []).map((id) => [id, memoryOf(one.memory)])));
    const texts = new Map((parts.workingMemory ?? []).map((fragment) => [fragment.id, textOf(fragment)]));
    return h("details", { class: "box" }, h("summary", null, `Working memory (${count(ids.length)})`),
      h("ol", null, ids.map((id) => h("li", null, fragmentLink(holders.get(id) ?? this.memory, id), " ",
        texts.has(id) ? clipped(texts.get(id), 200) : h("span", { class: "quiet" }, "ranked above")))));
  }
}

function memoryLink(path) {
  const { namespace, memory } = memoryOf(path);
  return h("a", { href: link("m", namespace, memory) }, given(path));
}

/** What each of several memories contributed to the answer. */
function drawMemories(memories) {
  const rows = memories.map((one) => h("tr", { "data-memory": one.memory }, h("th", { scope: "row" }, memoryLink(one.memory)),
    [one.recollections, one.eligible, one.considered].map((number) => h("td", { class: "number" }, count(number))),
    h("td", { class: "number" }, decimal(one.bestRelevance)), h("td", { class: "number" }, Number(one.revision ?? 0) ? count(one.revision) : ""),
    h("td", { class: "meaning" }, one.weak && h("span", { class: "mark weak" }, "weak"),
      one.degraded && [h("span", { class: "mark warn" }, "degraded"), given(one.degraded)], drawUnmatched(one.unmatched))));
  return table("Memories of the answer", ["Memory", ["Recollections", "number"], ["Eligible", "number"], ["Scored", "number"], ["Best relevance", "number"], ["Revision", "number"], "State"],
    h("tbody", null, rows));
}

/** The time zone of the browser; empty if it has none that a server knows. */
function browserZone() {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone ?? "";
  return zone.startsWith("Etc/") ? "" : zone;
}

const statusName = (status) => enumName(status, "TRUTH_STATUS_").replaceAll("-", " ");

/** The moment that a query asks for, as fields of a request. */
const momentOf = ({ asOfRevision, asOfTime }) => ({ asOfRevision, asOfTime });

/** The phrases of time that the server found, with their windows in the zone of the query. */
function drawInterpreted(found, zone) {
  return found.map(({ phrase, from, to }) => h("p", { class: "interpreted" }, h("span", { class: "mark" }, "time"), given(phrase, "content"), ": ",
    from && ["from ", timeIn(from, zone), " "], to && ["until ", timeIn(to, zone)], h("span", { class: "quiet" }, ` ${zone || "UTC"}`)));
}

/** What supersedes what, older before newer; the texts are read when the list is opened. */
function drawChain({ chain = [], fragment }, memory, signal) {
  if (!chain.length) return null;
  const list = h("ol");
  const details = h("details", { class: "chain" }, h("summary", null, `supersessions (${count(chain.length)})`), list);
  details.addEventListener("toggle", () => show(list, chain.map((one) => h("li", null, fragmentLink(memory, one.fragmentId), " ", time(one.observeTime), " ",
    h("span", { class: one.status === CURRENT ? "mark good" : "mark" }, statusName(one.status)),
    one.fragmentId === fragment.id ? h("b", null, "this one") : textLater(memory, one.fragmentId, signal)))), { once: true });
  return details;
}

/** An earlier statement that the one of better rank may have replaced, and the buttons that decide it. */
function drawEarlier({ fragment, laterId }, memory, mayWrite, signal) {
  const root = h("p", { class: "earlier" });
  const decide = (label, decision, done) => action(label, async () => {
    await call("MemoryService/ResolveConflict", { ...memory, newerId: laterId, olderId: fragment.id, decision: `CONFLICT_DECISION_${decision}`, requestId: crypto.randomUUID?.() }, signal);
    root.querySelectorAll("button").forEach((button) => button.remove());
    notify(done);
  });
  show(root, h("span", { class: "mark warn" }, "earlier statement"), " of ", time(fragment.observeTime), "; the later one is ", fragmentLink(memory, laterId),
    mayWrite && [" ", decide("The later one is true", "NEWER", "The later one supersedes it."), " ", decide("Both are true", "BOTH", "They are not paired again.")]);
  return root;
}

/** A suspicion about a recollection, and the other fragment. */
function drawSuspicion({ newerId, olderId, reason }, id, memory, signal) {
  const other = id === newerId ? olderId : newerId;
  return h("p", { class: "suspicion" }, h("span", { class: "mark warn" }, "suspected"), CONFLICT_REASONS[reason] ?? reason,
    id === newerId ? ", the older is " : ", the newer is ", fragmentLink(memory, other), ": ", textLater(memory, other, signal),
    " ", h("a", { href: link("m", memory.namespace, memory.memory, "conflicts") }, "conflicts"));
}

/** The metadata of a fragment, as labels. */
function drawMetadata({ metadata = {} }) {
  return Object.entries(metadata).map(([name, value]) => given(`${name}=${metadataValue(value)}`, "label"));
}

/** `explain(id)` explains one; null: that is not offered. */
function drawMisses(misses, memory, signal, explain) {
  if (!misses.length) return null;
  const holder = (miss) => (miss.memory ? memoryOf(miss.memory) : memory);
  const rows = misses.map((miss) => h("tr", null, h("td", { class: "text" }, textLater(holder(miss), miss.fragmentId, signal, 200), " ", fragmentLink(holder(miss), miss.fragmentId), miss.memory && [" in ", memoryLink(miss.memory)]),
    h("td", null, h("span", { class: "mark" }, miss.stage)), h("td", { class: "number" }, miss.score === undefined ? "" : decimal(miss.score)),
    h("td", { class: "number" }, miss.relevance === undefined ? "" : decimal(miss.relevance)), h("td", { class: "quiet" }, STAGES[miss.stage] ?? "", miss.supersededBy && [": ", fragmentLink(holder(miss), miss.supersededBy)]),
    h("td", null, explain && h("button", { type: "button", class: "link", onclick: () => explain(miss.fragmentId) }, "explain"))));
  return h("details", { class: "box", open: true }, h("summary", null, `Near misses (${count(misses.length)})`),
    table("Near misses", ["Fragment", "Removed by", ["Score", "number"], ["Relevance", "number"], "Reason", h("span", { class: "away" }, "Explain")], h("tbody", null, rows)));
}
