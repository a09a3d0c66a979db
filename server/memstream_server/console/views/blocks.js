// The blocks of a memory: list, one block with its versions; write, edit, delete.

import { call } from "../api.js";
import { action, clipped, confirmed, facts, field, given, h, hiddenMark, notify, show, table, visible } from "../dom.js";
import { count, link, metadataValue, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { rightsIn } from "../session.js";
import { drawDifference } from "./versions.js";

const HEADS = ["Block", "Text", ["Tokens", "number"], ["Version", "number"], "Written", "By"];

export async function render({ place, signal, memory, parts: [name] }) {
  const rights = await rightsIn(memory.namespace);
  if (name !== undefined) return new Page(place, memory, name, rights, signal).read();
  const rows = h("div");
  show(place, rights.has("write") && newBox(memory, signal), rows);
  return paged(rows, async (pageToken) => {
    const answer = await call("BlockService/ListBlocks", { ...memory, pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: answer.blocks ?? [], next: answer.nextPageToken };
  }, (blocks) => (blocks.length ? table("Blocks", HEADS, h("tbody", null, blocks.map((one) => drawRow(one, memory))))
    : h("p", { class: "empty" }, "This memory has no block: a small named text that an agent always has in its context.")))();
}

const blockLink = (memory, name) => link("m", memory.namespace, memory.memory, "blocks", name);

function drawRow(one, memory) {
  return h("tr", null, h("th", { scope: "row" }, h("a", { href: blockLink(memory, one.name) }, given(one.name))),
    h("td", { class: "text" }, clipped(one.text ?? "", 200), " ", hiddenMark(one), one.standing && standingMark(one.standing)), h("td", { class: "number" }, tokensOf(one)),
    h("td", { class: "number" }, count(one.version)), h("td", null, time(one.updateTime)), h("td", null, given(one.principal ?? "")));
}

const tokensOf = ({ tokens, maxTokens }) => (maxTokens ? `${count(tokens)} of ${count(maxTokens)}` : count(tokens));

/** A mark that says that the block keeps itself, and whether it is up to date. */
const standingMark = ({ problem }) => [" ", problem ? h("span", { class: "mark warn", title: problem }, "not up to date") : h("span", { class: "mark" }, "keeps itself")];

/** How the block keeps itself. */
function standingFacts({ question, model, revision, revisions, problem }) {
  const asked = (question.scopes ?? []).map(({ memory }) => [given(memory, "label"), revisions?.[memory] ? ` at revision ${count(revisions[memory])} ` : " "]);
  return [["answers", given(question.text)], ["asks", asked.length > 0 && asked], ["instructions", question.instructions && given(question.instructions)],
    ["written by", model ? given(model) : "what the question finds, without an LLM"], ["holds at revision", asked.length === 0 && count(revision ?? 0)],
    ["not up to date", problem && given(problem)]];
}

/** A box with a form that writes a new block, which is opened. */
function newBox(memory, signal) {
  const input = h("input", { type: "text", name: "name", autocomplete: "off", spellcheck: "false", required: true });
  const bound = h("input", { type: "number", name: "bound", min: 0, placeholder: "none" });
  const text = h("textarea", { name: "text", rows: 4, dir: "auto" });
  const problem = h("p", { class: "problem", role: "alert" });
  const form = h("form", { class: "create" }, h("div", { class: "fields" }, field("Name", input), field("Maximum tokens", bound)), field("Text", text),
    h("div", { class: "bar" }, h("button", { type: "submit", class: "main" }, "Create the block")), problem);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const block = input.value.trim();
    const request = { ...memory, block, text: text.value, absent: true, requestId: crypto.randomUUID?.() };
    if (bound.value) request.maxTokens = Number(bound.value);
    try {
      await call("BlockService/PutBlock", request, signal);
      location.hash = blockLink(memory, block);
    } catch (error) {
      if (signal.aborted) return;
      show(problem, error.reason === "ETAG_MISMATCH" ? "There is a block of this name already." : error.message);
    }
  });
  return h("details", { class: "box" }, h("summary", null, "Create a block"), form);
}

/** One block. */
class Page {
  constructor(place, memory, name, rights, signal) {
    Object.assign(this, { memory, request: { ...memory, block: name }, rights, signal });
    this.head = h("div");
    this.versions = h("section", { class: "versions" });
    show(place, h("h2", null, h("a", { href: link("m", memory.namespace, memory.memory, "blocks") }, "Blocks"), " / ", given(name)), this.head, this.versions);
  }

  async read() {
    try {
      const { block } = await call("BlockService/GetBlock", this.request, this.signal);
      this.draw(block);
      await this.readVersions();
    } catch (error) {
      if (error.code !== "not_found") throw error;
      show(this.head, h("p", { class: "empty" }, error.message));
      show(this.versions);
    }
  }

  draw(block) {
    this.block = block;
    const body = h("div", { class: "body" }, clipped(block.text ?? "", 4_000));
    const metadata = Object.entries(block.metadata ?? {});
    show(this.head, h("div", { class: "bar" }, this.rights.has("write") && !block.standing && action("Edit", () => this.edit(body)),
      this.rights.has("forget") && action("Delete …", () => this.delete(), "danger")), hiddenMark(block), block.standing && standingMark(block.standing), body,
      facts([["tokens", tokensOf(block)], ["version", count(block.version)], ["created", time(block.createTime)], ["written", time(block.updateTime)],
        ["by", block.principal && given(block.principal)], ...(block.standing ? standingFacts(block.standing) : []), ["metadata", metadata.length > 0 && metadata.map(([name, value]) => [given(`${name}=${metadataValue(value)}`, "label"), " "])]]
        .map(([term, value]) => [term, value || null])));
  }

  edit(body) {
    const text = h("textarea", { rows: 8, "aria-label": "Text", dir: "auto" });
    text.value = this.block.text ?? "";
    const cancel = () => this.draw(this.block);
    const save = action("Save", () => this.write(text.value), "main");
    text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save.click();
    });
    this.conflict = h("div", { role: "alert" });
    show(body, text, h("div", { class: "bar" }, save, h("button", { type: "button", onclick: cancel }, "Cancel"),
      h("span", { class: "quiet" }, "Ctrl-Enter saves, Escape cancels. It is saved only if nobody wrote the block meanwhile.")), this.conflict);
    text.focus();
  }

  /** Writes the text, unless somebody else wrote since it was read; what was typed then stays in its control. */
  async write(text) {
    try {
      await call("BlockService/PutBlock", { ...this.request, text, etag: this.block.etag, requestId: crypto.randomUUID?.() }, this.signal);
    } catch (error) {
      if (error.reason !== "ETAG_MISMATCH") throw error;
      return this.drawConflict(text);
    }
    await this.read();
    return notify("Saved.");
  }

  /** Shows what is there now as a difference to what was typed, and lets the next save replace it. */
  async drawConflict(typed) {
    const { block } = await call("BlockService/GetBlock", this.request, this.signal);
    show(this.conflict, h("p", null, h("span", { class: "mark warn" }, "changed meanwhile"), "Nothing was saved. From the block's present text to yours:"),
      drawDifference(block.text ?? "", typed), action("Replace the present text by mine", () => {
        this.block = block;
        return this.write(this.head.querySelector("textarea").value);
      }));
  }

  async delete() {
    const { block } = this.request;
    if (!(await confirmed(`Delete the block ${visible(block)} with all of its versions. Nobody can restore it.`, block))) return;
    await call("BlockService/DeleteBlock", { ...this.request, etag: this.block.etag, requestId: crypto.randomUUID?.() }, this.signal);
    location.hash = link("m", this.memory.namespace, this.memory.memory, "blocks");
  }

  /** The versions, each as what it changed in the one before. */
  async readVersions() {
    const { versions = [], nextPageToken } = await call("BlockService/ListBlockVersions", { ...this.request, pageSize: PAGE_SIZE }, this.signal);
    const entries = versions.map((one, at) => {
      const before = versions[at + 1];
      return h("li", { class: "box", "data-version": one.version }, h("div", { class: "bar" }, h("b", null, time(one.updateTime)), one.principal && [" by ", given(one.principal)],
        h("span", { class: "quiet" }, `version ${count(one.version)}, ${count(one.tokens)} tokens`)),
      before ? drawDifference(before.text ?? "", one.text ?? "") : h("p", { class: "quiet" }, "The earliest version that is shown."),
      h("details", null, h("summary", null, "text"), clipped(one.text ?? "", 4_000)));
    });
    show(this.versions, h("h2", null, `Versions (${count(versions.length)})`), h("ol", null, entries),
      nextPageToken && h("p", { class: "quiet" }, `The latest ${count(PAGE_SIZE)} versions are shown.`));
  }
}
