// The conversations of a namespace, by name, label, latest change or the text of messages; one as a timeline: its messages, as they arrive, and its plans.

import { readForm, remember, restoreForm } from "../address.js";
import { call } from "../api.js";
import { action, append, clipped, confirmed, facts, field, given, h, notify, select, show, table } from "../dom.js";
import { count, enumName, link, time } from "../format.js";
import { paged, PAGE_SIZE } from "../paging.js";
import { rightsIn } from "../session.js";
import { sharedStream } from "../shared_stream.js";

const LIVE_MAX = 200;
const FOUND_MAX = 20;
const CALLS_MAX = 50; // of one page of a search

export async function render({ place, signal, parts: [namespace = "", conversation = ""], query }) {
  if (!conversation) return showList(place, namespace, query, signal);
  const body = h("div");
  show(place, h("p", null, h("a", { href: link("conversations", namespace) }, namespace), " / ", h("b", null, given(conversation))), body);
  const talk = { namespace, conversation };
  const about = h("div");
  const messages = h("div");
  const fresh = h("ol", { class: "timeline", "aria-label": "New messages" });
  const state = h("p", { class: "quiet", role: "status" });
  const plans = h("div");
  show(body, about, messages, h("h2", null, "New since this page was opened"), fresh, state, plans);
  await drawFacts(about, talk, signal);
  const last = await lastNumber(talk, signal);
  await paged(messages, async (pageToken) => {
    const answer = await call("ConversationService/ListMessages", { ...talk, pageSize: PAGE_SIZE, pageToken }, signal);
    return { rows: answer.messages ?? [], next: answer.nextPageToken };
  }, (rows) => h("ol", { class: "timeline" }, rows.map((one) => entry(one))))();
  await drawPlans(plans, talk, signal);
  follow(fresh, state, talk, last, signal);
  return undefined;
}

/** The conversations of a namespace; the namespace may have no memories, so it can be typed. */
async function showList(place, asked, query, signal) {
  const { namespaces = [] } = await call("MemoryService/ListNamespaces", { pageSize: 1_000 }, signal);
  const namespace = asked || namespaces[0]?.name || "";
  const input = h("input", { name: "namespace", type: "search", value: namespace, required: true, autocomplete: "off", list: "namespaces", "data-secret": "" });
  const form = h("form", { class: "filters", role: "search" }, field("Namespace", input), h("datalist", { id: "namespaces" }, namespaces.map(({ name }) => h("option", { value: name }))),
    field("Name begins with", h("input", { name: "prefix", type: "search", autocomplete: "off" })),
    field("Message with", h("input", { name: "text", type: "search", placeholder: "words of it", autocomplete: "off" })),
    field("Label", h("input", { name: "label", type: "search", placeholder: "key=value", autocomplete: "off" })),
    field("Order", select("order", [["", "name"], ["latest", "latest change first"]])), h("button", { type: "submit" }, "Show"));
  restoreForm(form, query);
  const rows = h("div");
  show(place, form, rows);
  const { text } = form.elements;
  const list = (pageToken) => {
    const { prefix, label, order } = form.elements;
    const [key, value] = label.value.match(/^([^=]+)=(.*)$/s)?.slice(1) ?? [];
    const labels = key ? { [key.trim()]: value } : {};
    const request = { namespace, namePrefix: prefix.value.trim(), labels, latestFirst: order.value === "latest", pageSize: PAGE_SIZE, pageToken };
    return call("ConversationService/ListConversations", request, signal);
  };
  const open = !namespace ? null : paged(rows, async (pageToken) => {
    if (text.value.trim()) return findMessages(namespace, list, text.value.trim().toLowerCase(), pageToken, signal);
    const answer = await list(pageToken);
    return { rows: answer.conversations ?? [], next: answer.nextPageToken };
  }, (found, { calls, next }) => (calls ? drawFound(namespace, found, next) : drawList(namespace, found, form.elements)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value.trim() !== namespace) { location.hash = link("conversations", input.value.trim()); return; }
    remember({ ...readForm(form), page: null });
    open?.().catch((error) => { if (!signal.aborted) notify(error.message, "bad"); });
  });
  if (!open) return show(rows, h("p", { class: "empty" }, "There is no conversation. AppendMessage begins one."));
  return open();
}

/** Reads the messages of the listed conversations until a page is found. The token names the next conversation and page. */
async function findMessages(namespace, list, text, pageToken, signal) {
  const rows = [];
  let [listed = "", place = "0", page = ""] = pageToken.split("|");
  for (let calls = 1; ; place = "0") {
    const { conversations = [], nextPageToken = "" } = await list(listed);
    for (let at = Number(place); at < conversations.length; at += 1) {
      const { name } = conversations[at];
      do {
        const answer = await call("ConversationService/ListMessages", { namespace, conversation: name, pageSize: PAGE_SIZE, pageToken: page }, signal);
        rows.push(...(answer.messages ?? []).filter((one) => `${one.content ?? ""}\n${one.body ?? ""}`.toLowerCase().includes(text)).map((one) => ({ ...one, conversation: name })));
        page = answer.nextPageToken ?? "";
        calls += 1;
        if (rows.length >= FOUND_MAX || calls >= CALLS_MAX) return { rows, calls, next: page ? `${listed}|${at}|${page}` : `${listed}|${at + 1}|` };
      } while (page);
    }
    if (!nextPageToken) return { rows, calls, next: "" };
    listed = nextPageToken;
  }
}

function drawFound(namespace, found, next) {
  if (!found.length) return h("p", { class: "empty" }, next ? "No message here has these words. Next searches on." : "No message has these words.");
  return h("ol", { class: "timeline" }, found.map((one) => entry(one, h("p", { class: "meta" }, h("a", { href: link("conversations", namespace, one.conversation) }, given(one.conversation))))));
}

function drawList(namespace, found, { prefix, label }) {
  if (!found.length) {
    return h("p", { class: "empty" }, prefix.value || label.value ? "No conversation has such a name and label." : "This namespace has no conversation. AppendMessage begins one.");
  }
  const rows = found.map((one) => h("tr", null,
    h("th", { scope: "row" }, h("a", { href: link("conversations", namespace, one.name) }, given(one.name))), h("td", { class: "number" }, count(one.messageCount ?? 0)),
    h("td", null, h("span", { class: one.completed ? "mark good" : "mark" }, one.completed ? "completed" : "open")),
    h("td", { class: "labels" }, labelsOf(one)), h("td", null, time(one.updateTime)), h("td", null, time(one.createTime))));
  return table("Conversations", ["Conversation", ["Messages", "number"], "State", "Labels", "Changed", "Begun"], h("tbody", null, rows));
}

const labelsOf = ({ labels = {} }) => Object.entries(labels).map(([key, value]) => h("span", { class: "label" }, given(`${key}=${value}`)));

/** Labels, counts and the memory that it feeds; with the right to forget, a button that deletes it. */
async function drawFacts(place, talk, signal) {
  const { conversation: one = {} } = await call("ConversationService/GetConversation", talk, signal);
  const { namespace, conversation } = talk;
  const feeds = one.feedMemory && [h("a", { href: link("m", namespace, one.feedMemory) }, given(one.feedMemory)), ` up to no. ${count(one.fedNumber ?? 0)}`];
  const labels = labelsOf(one);
  const may = await rightsIn(namespace);
  const remove = may.has("forget") && action("Delete", async () => {
    if (!(await confirmed(`Delete ${conversation} with its messages, plans and state, for good.`, conversation))) return;
    await call("ConversationService/DeleteConversation", talk, signal);
    location.hash = link("conversations", namespace);
  }, "danger");
  show(place, facts([["Messages", count(one.messageCount ?? 0)], ["Labels", labels.length ? labels : null],
    ["Expires", one.expireTime && time(one.expireTime)], ["Feeds", feeds]]), remove);
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

function entry(message, where = null) {
  const receiver = message.receiver ? [" → ", given(message.receiver)] : "";
  const outcome = message.success === undefined ? null : h("span", { class: `mark${message.success ? "" : " warn"}` }, message.success ? "success" : "failed");
  return h("li", null, h("div", { class: "when" }, time(message.createTime, false), h("br"), h("span", { class: "quiet" }, `no. ${count(message.number)}`)),
    h("div", null, where, h("b", null, given(message.sender || message.name || message.role), receiver), " ", clipped(message.content ?? ""),
      message.body !== undefined && h("p", null, h("code", null, clipped(message.body))),
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
      append(list, messages.map((one) => entry(one)));
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
