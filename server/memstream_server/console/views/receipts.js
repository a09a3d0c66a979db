// Receipts of recalls: a list; and one receipt with its ranking as it was given, next to the ranking of its replay.

import { call } from "../api.js";
import { clipped, facts, given, h, show, table, visible } from "../dom.js";
import { fragmentLink } from "../events.js";
import { count, decimal, enumName, link, textOf, time } from "../format.js";
import { paged } from "../paging.js";
import { rightsIn } from "../session.js";

const ROWS = 50;
const HEADS = ["Receipt", "Recalled", "By", ["Revision", "number"], ["Results", "number"], "Query"];

export async function render({ place, signal, memory, parts }) {
  if (!(await rightsIn(memory.namespace)).has("recall")) {
    return show(place, h("p", { class: "empty" }, "Your key does not have the right to read receipts (recall)."));
  }
  return parts[0] ? showReceipt(place, signal, memory, parts[0]) : showList(place, signal, memory);
}

function showList(place, signal, memory) {
  const rows = h("div");
  show(place, h("p", { class: "quiet" }, "A query that asks for a receipt keeps its policy, revision, ranking and scores. A replay ranks the memory as of that revision again."), rows);
  return paged(rows, async (pageToken) => {
    const { receipts = [], nextPageToken } = await call("MemoryService/ListRecallReceipts", { ...memory, pageSize: ROWS, pageToken }, signal);
    return { rows: receipts, next: nextPageToken };
  }, (receipts) => (receipts.length ? table("Receipts", HEADS, h("tbody", null, receipts.map((one) => h("tr", null,
    h("th", { scope: "row" }, h("a", { href: link("m", memory.namespace, memory.memory, "receipts", one.id) }, one.id)),
    h("td", null, time(one.createTime)), h("td", null, given(one.principal)), h("td", { class: "number" }, count(one.revision)),
    h("td", { class: "number" }, count((one.ranking ?? []).length)), h("td", null, queryOf(one, 200))))))
    : h("p", { class: "empty" }, "No receipt is kept: no query asked for one, or the policy history.receipts keeps none.")), ROWS)();
}

function queryOf(receipt, limit) {
  if (receipt.queryErased) return h("span", { class: "mark warn" }, "erased");
  return clipped(receipt.query?.structured === undefined ? receipt.query?.text ?? "" : textOf(receipt.query), limit);
}

async function showReceipt(place, signal, memory, receiptId) {
  const replay = await call("MemoryService/ReplayRecall", { ...memory, receiptId }, signal);
  const { receipt, recollections = [], same = false, differences = [] } = replay;
  const texts = new Map(recollections.map(({ fragment }) => [fragment.id, textOf(fragment)]));
  const erased = new Set(receipt.erasedIds ?? []);
  const ranked = (one) => ({ id: one.fragmentId, score: one.score, relevance: one.relevance });
  const again = (one) => ({ id: one.fragment.id, score: one.score, relevance: one.relevance });
  show(place,
    h("p", { class: same ? "mark good" : "mark warn", role: "status" }, same ? "the replay has the same ranking, to the last bit" : "the replay does not have the same ranking"),
    h("p", null, "Query: ", queryOf(receipt, 1_000)),
    facts([
      ["recalled", time(receipt.createTime)],
      ["by", receipt.principal && given(receipt.principal)],
      ["revision", count(receipt.revision)],
      ["formula", receipt.formula],
      ["embedding", visible(receipt.embeddingModel)],
      ["degraded", receipt.degraded && visible(receipt.degraded)],
    ]),
    differences.length > 0 && h("section", { class: "box" }, h("h2", null, "Differences"), h("ul", null, differences.map((one) => h("li", null,
      enumName(one.type, "REPLAY_DIFFERENCE_TYPE_"), " ", one.fragmentId && fragmentLink(memory, one.fragmentId),
      (one.recorded || one.present) && given(`${one.recorded || "nothing"}, now ${one.present || "nothing"}`))))),
    h("div", { class: "columns" },
      drawRanking("As it was answered", (receipt.ranking ?? []).map(ranked), { memory, texts, erased }),
      drawRanking("Replay", recollections.map(again), { memory, texts, erased })));
}

function drawRanking(title, ranking, { memory, texts, erased }) {
  return h("section", { class: "side", "aria-label": title }, h("h2", null, title), ranking.length ? h("ol", null, ranking.map((one) => h("li", { "data-id": one.id },
    fragmentLink(memory, one.id), h("span", { class: "quiet" }, ` score ${decimal(one.score)}, relevance ${decimal(one.relevance)}`),
    h("div", null, texts.has(one.id) ? clipped(texts.get(one.id)) : h("span", { class: "empty" }, erased.has(one.id) ? "erased" : "absent from the replay"))))) : h("p", { class: "empty" }, "nothing"));
}
