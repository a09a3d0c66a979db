// Long-running operations with their progress; those that the caller may start can be cancelled.

import { call } from "../api.js";
import { action, append, h, notify, show, table, visible } from "../dom.js";
import { count, enumName, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { rightsIn } from "../session.js";
import { pause } from "../shared_stream.js";

const POLL_MS = 2_000;
const RIGHT_OF = { reindex: "admin", purge: "forget", erase: "forget", reflect: "write", import: "write" };
const OPEN = ["OPERATION_STATE_QUEUED", "OPERATION_STATE_RUNNING"];

// Operations that this page has cancelled; one may go on until it has finished a step.
const cancelled = new Set();

export async function render({ place, signal }) {
  const rows = new Map();
  const list = h("div");
  const everywhere = await rightsIn("");
  show(place, h("div", { class: "bar" }, everywhere.has("forget") && action("Purge all namespaces", () => begin("OperationService/StartPurge", {})),
    everywhere.has("admin") && [action("Rebuild the index", () => begin("OperationService/StartReindex", {})), action("Compute missing vectors", () => begin("OperationService/StartReindex", { missing: true })),
      action("Compute all vectors again", () => begin("OperationService/StartReindex", { embed: true }))]), list);
  const open = paged(list, async (pageToken) => {
    const answer = await call("OperationService/ListOperations", { pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: answer.operations ?? [], next: answer.nextPageToken };
  }, (operations) => {
    rows.clear();
    if (!operations.length) return h("p", { class: "empty" }, "There are no operations. They are kept for seven days after their end.");
    const body = h("tbody");
    for (const operation of operations) {
      const row = h("tr", { "data-id": operation.id });
      rows.set(operation.id, { row, operation });
      drawRow(row, operation, signal);
      body.append(row);
    }
    return table("Operations, newest first", ["Operation", "Where", "State", "Progress", "Started", "Ended", "Error", h("span", { class: "away" }, "Cancel")], body);
  });
  const begin = async (method, request) => {
    await call(method, { ...request, requestId: crypto.randomUUID?.() }, signal);
    await open();
  };
  await open();
  poll(rows, open, signal);
}

async function poll(rows, open, signal) {
  while (!signal.aborted) {
    await pause(POLL_MS, signal);
    if (document.hidden || signal.aborted) continue;
    try {
      const running = [...rows.values()].filter(({ operation }) => OPEN.includes(operation.state));
      for (const each of running) {
        each.operation = (await call("OperationService/GetOperation", { id: each.operation.id }, signal)).operation;
        drawRow(each.row, each.operation, signal);
      }
      const { operations = [] } = await call("OperationService/ListOperations", { pageSize: 1 }, signal);
      if (operations.length && !rows.has(operations[0].id)) await open();
      notify("");
    } catch (error) {
      if (!signal.aborted) notify(error.message, "bad");
    }
  }
}

async function drawRow(row, operation, signal) {
  const { id, namespace = "", memory = "", state, done, total, unit = "" } = operation;
  const isOpen = OPEN.includes(state);
  const progress = Number(total ?? 0) ? h("progress", { max: total, value: done ?? 0, "aria-label": `progress of ${operation.type}` }) : null;
  const last = h("td");
  const former = row.contains(document.activeElement);
  show(row, h("th", { scope: "row" }, operation.type), h("td", null, visible([namespace, memory].filter(Boolean).join("/")) || "server"),
    h("td", null, h("span", { class: `mark${state === "OPERATION_STATE_FAILED" ? " warn" : ""}` }, enumName(state, "OPERATION_STATE_"))),
    h("td", null, progress, ` ${count(done)}${total ? ` of ${count(total)}` : ""} ${unit}`),
    h("td", null, time(operation.createTime)), h("td", null, time(operation.endTime)),
    h("td", null, visible(operation.error?.message ?? "")), last);
  if (!isOpen) return undefined;
  if (cancelled.has(id)) return append(last, h("span", { class: "quiet" }, "cancel requested"));
  const rights = await rightsIn(namespace).catch(() => new Set());
  if (!rights.has(RIGHT_OF[operation.type] ?? "admin")) return undefined;
  const button = action("Cancel", async () => {
    const answer = await call("OperationService/CancelOperation", { id }, signal);
    cancelled.add(id);
    Object.assign(operation, answer.operation);
    drawRow(row, operation, signal);
  });
  show(last, button);
  if (former) button.focus();
  return undefined;
}
