// A fragment: its fields, what supersedes it, its versions, its life as events, its sources and what derives from it;
// forget, restore, pin, edit, supersede.

import { call } from "../api.js";
import { action, append, clipped, confirmed, facts, field, given, h, hiddenMark, notify, show, table, visible } from "../dom.js";
import { EVENT_HEADS, eventRow, fragmentLink } from "../events.js";
import { count, decimal, enumName, metadataValue, tierName, time } from "../format.js";
import { textLater } from "../related.js";
import { rightsIn } from "../session.js";
import { findFragment } from "../why.js";
import { drawVersions } from "./versions.js";

const SOURCES_MAX = 20;
const ROWS_PART = 200;
const DERIVED_MAX = 500;
// Events that name another fragment but derive nothing from it.
const RELATES = new Set(["SUPERSEDED", "SUPERSESSION_UNDONE", "CONFLICT_SUSPECTED", "CONFLICT_RESOLVED", "CONFLICT_ENDED"].map((name) => `EVENT_TYPE_${name}`));

export async function render({ place, signal, memory, parts: [id] }) {
  const rights = await rightsIn(memory.namespace);
  const page = new Page(place, memory, id, rights, signal);
  await page.read();
}

class Page {
  constructor(place, memory, id, rights, signal) {
    Object.assign(this, { place, memory, id, rights, signal });
    this.head = h("div");
    this.versions = h("div");
    this.rest = h("div");
    show(place, this.head, this.versions, this.rest);
  }

  async read() {
    try {
      const history = await this.readHistory();
      const { fragment } = history;
      this.draw(fragment, history);
      show(this.rest, this.drawSources(fragment), this.drawLife());
    } catch (error) {
      if (error.code !== "not_found") throw error;
      this.drawAbsent();
    }
  }

  /** The fragment as it is, and its versions. */
  readHistory() {
    return call("MemoryService/GetFragmentHistory", { ...this.memory, id: this.id }, this.signal);
  }

  drawAbsent() {
    show(this.versions);
    show(this.head, h("p", { class: "empty" }, "This fragment is forgotten, expired or gone."),
      h("p", null, given(this.id)),
      this.rights.has("forget") && action("Restore", () => this.restore()));
    show(this.rest, this.drawLife());
  }

  draw(fragment, history = null) {
    this.fragment = fragment;
    if (history) show(this.versions, drawVersions(history, this.rights.has("write") ? (version) => this.restoreVersion(version) : null));
    const body = h("div", { class: "body" }, fragment.structured
      ? facts(Object.entries(fragment.structured).map(([name, value]) => [name, given(value, "content")]))
      : clipped(fragment.content ?? "", 4_000));
    show(this.head, h("div", { class: "bar" }, this.drawActions(fragment, body)), this.drawSuperseded(fragment), drawHidden(fragment), body,
      fragment.mergedText && h("details", { class: "box" }, h("summary", null, "Merged text"), clipped(fragment.mergedText, 4_000)),
      drawFields(fragment, this.memory));
  }

  /** What supersedes the fragment, with its text. */
  drawSuperseded(fragment) {
    if (!fragment.supersededBy) return null;
    return h("p", { class: "superseded" }, h("span", { class: "mark warn" }, "superseded"), " by ", fragmentLink(this.memory, fragment.supersededBy),
      ": ", textLater(this.memory, fragment.supersededBy, this.signal));
  }

  drawActions(fragment, body) {
    const write = this.rights.has("write");
    return [
      write && !fragment.structured && action("Edit", () => this.edit(body)),
      write && action(fragment.pinned ? "Unpin" : "Pin", () => this.update({ pinned: !fragment.pinned }, "pinned")),
      write && h("button", { type: "button", onclick: (event) => this.askNewer(event.target) }, "Supersede by …"),
      // RestoreFragments needs the right to forget.
      fragment.supersededBy && this.rights.has("forget") && action("Undo the supersession", () => this.restore("It is current again.")),
      this.rights.has("forget") && action("Forget", () => this.forget(), "danger"),
      this.rights.has("forget") && action("Erase …", () => this.erase(), "danger"),
    ];
  }

  /** Asks which fragment supersedes this one; the form takes the place of the button. */
  askNewer(button) {
    const input = h("input", { type: "text", name: "newer", autocomplete: "off", spellcheck: "false", required: true });
    const form = h("form", { class: "bar" }, field("Newer fragment", input), h("button", { type: "submit" }, "Supersede"),
      h("span", { class: "quiet" }, "an id or external id; Escape cancels"));
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      form.replaceWith(button);
      button.focus();
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.supersede(input.value.trim()).catch((error) => { if (!this.signal.aborted) notify(error.message, "bad"); });
    });
    button.replaceWith(form);
    input.focus();
  }

  async supersede(key) {
    const newer = await findFragment(this.memory, key, this.signal);
    const request = { ...this.memory, ids: [this.id], newerId: newer.id, requestId: crypto.randomUUID?.() };
    const { superseded } = await call("MemoryService/SupersedeFragments", request, this.signal);
    await this.read();
    notify(Number(superseded ?? 0) ? "Superseded." : "That fragment superseded it already.");
  }

  restoreVersion(version) {
    const { id, etag } = this.fragment;
    const request = { ...this.memory, id, etag, version, requestId: crypto.randomUUID?.() };
    return this.change("MemoryService/RestoreFragmentVersion", request);
  }

  update(changes, updateMask) {
    const { id, etag } = this.fragment;
    const request = { ...this.memory, fragment: { id, etag, ...changes }, updateMask, requestId: crypto.randomUUID?.() };
    return this.change("MemoryService/UpdateFragment", request);
  }

  /** Changes the fragment, unless somebody else did since it was read. */
  async change(method, request) {
    try {
      await call(method, request, this.signal);
      const history = await this.readHistory();
      this.draw(history.fragment, history);
      notify("Saved.");
    } catch (error) {
      if (error.reason !== "ETAG_MISMATCH") throw error;
      show(document.getElementById("notice"), h("p", null, "The fragment was changed meanwhile; nothing was saved. ", error.message),
        action("Load it again", () => { notify(""); return this.read(); }));
      document.getElementById("notice").className = "bad";
    }
  }

  edit(body) {
    const text = h("textarea", { rows: 8, "aria-label": "Content", dir: "auto" });
    text.value = this.fragment.content ?? "";
    const cancel = () => this.draw(this.fragment);
    const save = action("Save", () => this.update({ content: text.value }, "content"), "main");
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save.click();
    });
    show(body, text, h("div", { class: "bar" }, save, h("button", { type: "button", onclick: cancel }, "Cancel"),
      h("span", { class: "quiet" }, "Ctrl-Enter saves, Escape cancels. It is saved only if nobody changed the fragment meanwhile.")));
    text.focus();
  }

  async forget() {
    const { forgotten } = await call("MemoryService/ForgetFragments", { ...this.memory, ids: [this.id] }, this.signal);
    this.drawAbsent();
    notify(Number(forgotten ?? 0) ? "Forgotten. It can be restored within the grace period of the policy." : "It was forgotten already.");
  }

  async erase() {
    const word = this.id.slice(-8);
    if (!(await confirmed("Erase this fragment with its vector, its versions and all that derives from it, from every file. Nobody can restore it.", word))) return;
    const { operation } = await call("MemoryService/EraseFragments", { ...this.memory, ids: [this.id], requestId: crypto.randomUUID?.() }, this.signal);
    notify(`The erasure has started as operation ${operation.id}.`);
  }

  async restore(done = "Restored.") {
    const { restored } = await call("MemoryService/RestoreFragments", { ...this.memory, ids: [this.id] }, this.signal);
    if (!Number(restored ?? 0)) return notify("It cannot be restored: it is gone, or its tier has no room.", "bad");
    await this.read();
    return notify(done);
  }

  drawSources(fragment) {
    const ids = fragment.sources ?? [];
    if (!ids.length) return null;
    const list = h("ul", { class: "related" });
    for (const id of ids.slice(0, SOURCES_MAX)) {
      append(list, h("li", null, fragmentLink(this.memory, id), " ", textLater(this.memory, id, this.signal)));
    }
    return h("section", null, h("h2", null, `Sources (${count(ids.length)})`), list,
      ids.length > SOURCES_MAX && h("p", { class: "quiet" }, `The first ${SOURCES_MAX} are listed.`));
  }

  /** The events that concern the fragment, and what derives from it. */
  drawLife() {
    const life = { body: h("tbody"), derived: h("ul", { class: "related" }), state: h("p", { class: "quiet", role: "status" }), more: h("span"), seen: new Set(), token: "", events: 0 };
    this.readOn(life);
    return [
      h("section", null, h("h2", null, "Life"), table("Events of this fragment", EVENT_HEADS, life.body, "steps"),
        h("div", { class: "bar" }, life.state, life.more)),
      h("section", null, h("h2", null, "What derives from it"), life.derived),
    ];
  }

  async readOn(life) {
    show(life.more);
    show(life.state, "Events are read …");
    const until = life.events + ROWS_PART;
    try {
      do {
        const answer = await call("MemoryService/ListFragmentEvents", { ...this.memory, id: this.id, pageSize: ROWS_PART, pageToken: life.token }, this.signal);
        life.token = answer.nextPageToken ?? "";
        const pruned = Number(answer.prunedRevision ?? 0);
        life.kept = pruned ? ` Events up to revision ${count(pruned)} are no longer kept.` : "";
        for (const event of answer.events ?? []) {
          append(life.body, eventRow(event, this.memory));
          this.addDerived(event, life);
          life.events += 1;
        }
      } while (life.token && life.events < until);
      show(life.state, `${count(life.events)} events.${life.kept}`);
      if (life.token) show(life.more, action("Read more", () => this.readOn(life)));
      else if (!life.derived.children.length) append(life.derived, h("li", { class: "empty" }, "nothing"));
    } catch (error) {
      if (!this.signal.aborted) show(life.state, error.message);
    }
  }

  addDerived(event, life) {
    const derives = event.fragmentId && event.fragmentId !== this.id && !RELATES.has(event.type) && (event.otherId === this.id || (event.sources ?? []).includes(this.id));
    if (!derives || life.seen.has(event.fragmentId) || life.seen.size === DERIVED_MAX) return;
    life.seen.add(event.fragmentId);
    const how = event.otherId === this.id ? enumName(event.type, "EVENT_TYPE_") : `${enumName(event.type, "EVENT_TYPE_")} with it as a source`;
    append(life.derived, h("li", null, fragmentLink(this.memory, event.fragmentId), ` ${how}`));
  }
}

/** Which characters of the fragment nobody sees; the texts below have them written out. */
function drawHidden(fragment) {
  const mark = hiddenMark(fragment);
  return mark && h("p", null, mark, ` It has characters that nobody sees, written out below: ${fragment.hiddenCharacters.join(", ")}.`);
}

function drawFields(fragment, memory) {
  const metadata = Object.entries(fragment.metadata ?? {});
  return h("div", { class: "columns" }, facts([
    ["id", h("code", null, fragment.id)],
    ["external id", fragment.externalId && given(fragment.externalId)],
    ["tier", tierName(fragment.tier)],
    ["kind", enumName(fragment.kind, "FRAGMENT_KIND_")],
    ["speaker", fragment.speaker && given(fragment.speaker)],
    ["role", fragment.role && enumName(fragment.role, "ROLE_")],
    ["session", fragment.session && given(fragment.session)],
    ["importance", decimal(fragment.importance)],
    ["pinned", fragment.pinned && "yes"],
    ["supersedes", fragment.supersedes?.length && fragment.supersedes.slice(0, SOURCES_MAX).map((id) => [fragmentLink(memory, id), " "])],
    ["etag", h("code", null, fragment.etag ?? "")],
  ]), facts([
    ["perceived", time(fragment.observeTime)],
    ["received", time(fragment.createTime)],
    ["recalled last", fragment.accessTime && time(fragment.accessTime)],
    ["valid from", fragment.validFrom && time(fragment.validFrom)],
    ["valid until", fragment.validUntil && time(fragment.validUntil)],
    ["superseded", fragment.supersedeTime && time(fragment.supersedeTime)],
    ["expires", fragment.expireTime && time(fragment.expireTime)],
    ["recalled", `${count(fragment.accessCount)}×`],
    ["enhanced", `${count(fragment.enhancementCount)}×`],
    ["repeated", `${count(fragment.duplicateCount)}×`],
    ["model", fragment.model || "no vector"],
    ["tokens", fragment.tokenCount && count(fragment.tokenCount)],
  ]), metadata.length > 0 && h("section", null, h("h2", null, "Metadata"),
    facts(metadata.map(([name, value]) => [visible(name), given(metadataValue(value))]))));
}
