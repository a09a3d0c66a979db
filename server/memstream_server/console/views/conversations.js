// A conversation as a timeline: its messages, as they arrive, and its plans.

import { call, stream } from "../api.js";
import { append, clipped, field, given, h, show, table } from "../dom.js";
import { count, enumName, link, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";

const LIVE_MAX = 200;

export async function render({ place, signal, parts: [namespace = "", conversation = ""] }) {
  const input = (name, value) => h("input", { name, type: "search", value, required: true, autocomplete: "off" });
  const form = h("form", { class: "filters", role: "search" }, field("Namespace", input("namespace", namespace)),
    field("Conversation", input("conversation", conversation)), h("button", { type: "submit", class: "main" }, "Open"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const { elements } = form;
    location.hash = link("conversations", elements.namespace.value.trim(), elements.conversation.value.trim());
  });
  const body = h("div");
  show(place, form, body);
  if (!namespace || !conversation) {
    return show(body, h("p", { class: "empty" }, "Name a conversation: the server keeps no list of them. A memory's own sessions are in its timeline."));
  }
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
    for await (const message of stream("ConversationService/WatchMessages", { ...talk, afterNumber }, signal)) {
      show(state, message.completed ? "The conversation is completed." : "live");
      append(list, (message.messages ?? []).map(entry));
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
