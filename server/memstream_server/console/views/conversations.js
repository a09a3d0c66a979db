// The conversations of a namespace; one as a timeline: its messages, as they arrive, and its plans.

import { call } from "../api.js";
import { append, clipped, field, given, h, show, table } from "../dom.js";
import { count, enumName, link, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { sharedStream } from "../shared_stream.js";

const LIVE_MAX = 200;

export async function render({ place, signal, parts: [namespace = "", conversation = ""] }) {
  if (!conversation) return showList(place, namespace, signal);
  const body = h("div");
  show(place, h("p", null, h("a", { href: link("conversations", namespace) }, namespace), " / ", h("b", null, given(conversation))), body);
  const talk = { namespace, conversation };
  const messages = h("div");
  const fresh = h("ol", { class: "timeline", "aria-label": "New messages" });
  const state = h("p", { class: "quiet", role: "status" });
  const plans = h("div");
  show(body, messages, h("h2", null, "New since this page was opened"), fresh, state, plans);
  const last = await lastNumber(talk, signal);
  await paged(messages, async (pageToken) => {
    const answer = await call("ConversationService/ListMessages", { ...talk, pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: answer.messages ?? [], next: answer.nextPageToken };
  }, (rows) => h("ol", { class: "timeline" }, rows.map(entry)))();
  await drawPlans(plans, talk, signal);
  follow(fresh, state, talk, last, signal);
  return undefined;
}

/** The conversations of a namespace; the namespace may have no memories, so it can be typed. */
async function showList(place, asked, signal) {
  const { namespaces = [] } = await call("MemoryService/ListNamespaces", { pageSize: 1_000 }, signal);
  const namespace = asked || namespaces[0]?.name || "";
  const input = h("input", { name: "namespace", type: "search", value: namespace, required: true, autocomplete: "off", list: "namespaces" });
  const form = h("form", { class: "filters", role: "search" }, field("Namespace", input), h("datalist", { id: "namespaces" }, namespaces.map(({ name }) => h("option", { value: name }))),
    h("button", { type: "submit" }, "Show"));
  form.addEventListener("submit", (event) => { event.preventDefault(); location.hash = link("conversations", input.value.trim()); });
  const rows = h("div");
  show(place, form, rows);
  if (!namespace) return show(rows, h("p", { class: "empty" }, "There is no conversation. AppendMessage begins one."));
  return paged(rows, async (pageToken) => {
    const answer = await call("ConversationService/ListConversations", { namespace, pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: answer.conversations ?? [], next: answer.nextPageToken };
  }, (found) => (found.length ? table("Conversations", ["Conversation", ["Last message", "number"], "State", "Begun"], h("tbody", null, found.map((one) => h("tr", null,
    h("th", { scope: "row" }, h("a", { href: link("conversations", namespace, one.name) }, given(one.name))), h("td", { class: "number" }, Number(one.lastNumber ?? 0) ? `no. ${count(one.lastNumber)}` : "none"),
    h("td", null, h("span", { class: one.completed ? "mark good" : "mark" }, one.completed ? "completed" : "open")), h("td", null, time(one.createTime))))))
    : h("p", { class: "empty" }, "This namespace has no conversation. AppendMessage begins one.")))();
}

async function lastNumber(talk, signal) {
  try {
    return (await call("ConversationService/GetLastMessage", talk, signal)).message?.number ?? "0";
  } catch (error) {
    if (error.reason !== "CONVERSATION_NOT_FOUND") throw error;
    await call("ConversationService/ListMessages", { ...talk, pageSize: 1 }, signal); // it may have plans only
    return "0";
  }
}

function entry(message) {
  const receiver = message.receiver ? [" → ", given(message.receiver)] : "";
  const outcome = message.success === undefined ? null : h("span", { class: `mark${message.success ? "" : " warn"}` }, message.success ? "success" : "failed");
  return h("li", null, h("div", { class: "when" }, time(message.createTime, false), h("br"), h("span", { class: "quiet" }, `no. ${count(message.number)}`)),
    h("div", null, h("b", null, given(message.sender), receiver), " ", clipped(message.content ?? ""),
      h("p", { class: "quiet meta" }, message.role && [given(message.role), " "], message.rounds && `round ${count(message.rounds)} `,
        message.modelName && [given(message.modelName), " "], outcome)));
}

async function follow(list, state, talk, afterNumber, signal) {
  try {
    let seen = afterNumber;
    const request = () => ({ ...talk, afterNumber: seen });
    for await (const message of sharedStream("ConversationService/WatchMessages", request, signal, ({ messages = [] }) => !messages.length)) {
      show(state, message.completed ? "The conversation is completed." : "live");
      const messages = message.messages ?? [];
      append(list, messages.map(entry));
      if (messages.length) seen = messages.at(-1).number;
      while (list.children.length > LIVE_MAX) list.firstChild.remove();
    }
  } catch (error) {
    if (!signal.aborted) show(state, `Not live: ${error.message}`);
  }
}

async function drawPlans(place, talk, signal) {
  const { plans = [] } = await call("ConversationService/ListPlans", { ...talk, pageSize: PAGE_SIZE }, signal);
  if (!plans.length) return;
  const rows = plans.map((plan) => h("tr", null, h("td", { class: "number" }, count(plan.subTaskNumber)), h("td", null, given(plan.subTaskTitle)),
    h("td", null, h("span", { class: "mark" }, enumName(plan.state, "PLAN_STATE_"))), h("td", null, given(plan.subTaskAgent)),
    h("td", { class: "number" }, count(plan.retryTimes)), h("td", null, clipped(plan.result ?? "", 200))));
  show(place, h("h2", null, "Plans"), table("Plans", [["No.", "number"], "Task", "State", "Agent", ["Retries", "number"], "Result"], h("tbody", null, rows)));
}
