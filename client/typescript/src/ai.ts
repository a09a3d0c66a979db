/**
 * The AI SDK (npm `ai`) on a memstream server: a middleware that gives a model its memory and its conversation, and tools
 * with which a model reads and writes a memory itself.
 *
 * Rule 1: what the application sends is stored before the model is called; the call of a tool is stored together with its
 * output, in the step that sends both to the model. So a turn that is cut off leaves no call without its output.
 * Rule 2: a message that the conversation has already is not stored again, whether the application sends the whole chat
 * or its new messages alone.
 * Rule 3: what is recalled is in the prompt of the model alone: it is neither stored nor observed.
 *
 * The import fails where `ai` is missing or has a version that this module was not tested with.
 */
import { createRequire } from "node:module";

import { timestampDate } from "@bufbuild/protobuf/wkt";
import type { LanguageModelMiddleware, Tool } from "ai";

import { collectPart, countCovered, fromBody, signatureOf, textOf, toJson, toReply } from "./ai_messages.js";
import type { CallOptions, Content, Message, StreamPart } from "./ai_messages.js";
import { checkOptions } from "./checks.js";
import type { Conversation } from "./conversation.js";
import { asError, fromStatus, invalidField } from "./errors.js";
import { ContextPartKind } from "./gen/memstream/v1/context_service_pb.js";
import { ErrorReason } from "./gen/memstream/v1/error_pb.js";
import { Role } from "./gen/memstream/v1/fragment_pb.js";
import type { Fragment } from "./gen/memstream/v1/fragment_pb.js";
import type { Client } from "./index.js";

/** The lowest version of `ai` that this module takes, and the first that it does not. */
const VERSIONS = { lowest: [7, 0, 173], below: [7, 1] } as const;
/** Bodies in one call: below the server's limit of a message, unless one body alone is larger. */
const CALL_BYTES_MAX = 3 << 20;
/** Characters of a text that are observed or asked: below the server's limit of a content in bytes. */
const TEXT_MAX = 16_000;
const HISTORY_MAX = 200;
/** Turns of one middleware at the same time. */
const OPEN_MAX = 64;

checkVersion();
const { jsonSchema, tool } = await import("ai");

function checkVersion(): void {
  const wanted = `ai@>=${VERSIONS.lowest.join(".")} <${VERSIONS.below.join(".")}`;
  let found: string;
  try {
    ({ version: found } = createRequire(import.meta.url)("ai/package.json") as { version: string });
  } catch (cause) {
    throw new Error(`@memstream/client/ai needs ${wanted}, which is not installed: npm install '${wanted}'`, { cause });
  }
  const numbers = found.split(/[^0-9]+/).map(Number);
  if (isBefore(numbers, VERSIONS.lowest) || !isBefore(numbers, VERSIONS.below)) {
    throw new Error(`@memstream/client/ai needs ${wanted}, and ${found} is installed: npm install '${wanted}'`);
  }
}

/** Whether a version is before another. */
function isBefore(version: readonly number[], other: readonly number[]): boolean {
  const place = other.findIndex((number, index) => number !== (version[index] ?? 0));
  return place >= 0 && (version[place] ?? 0) < (other[place] ?? 0);
}

/** Options of `memstreamMiddleware`; a memory, a conversation, or both. */
export interface MemoryOptions {
  /** "namespace/name": recalled before each turn, and observes question and reply after it. Created if it does not exist. */
  readonly memory?: string;
  /** "namespace/name": restored before each turn, and stores each message. Created by the first. */
  readonly conversation?: string;
  /** Whose conversation it is, as the label `user`. */
  readonly user?: string;
  /** Blocks that are always in the system prompt, each as "namespace/memory#name". */
  readonly blocks?: readonly string[];
  /** Most tokens of what is recalled, question and blocks included. Default: the server's, 4,000. */
  readonly budget?: number;
  /** Most earlier messages that are restored; they begin with one of the user. Default 200. */
  readonly historyMax?: number;
  /** Gets a failure of the memory, and the turn continues without it. Default: the turn fails. */
  readonly onError?: (error: unknown) => void;
}

/**
 * Returns a middleware for `wrapLanguageModel`: before each turn it restores the conversation and recalls what the memory
 * knows of the question, after it it stores the reply in both. Use one for each conversation.
 */
export function memstreamMiddleware(client: Client, options: MemoryOptions): LanguageModelMiddleware {
  checkOptions("options", options, {
    memory: true, conversation: true, user: true, blocks: true, budget: true, historyMax: true, onError: true,
  });
  const { historyMax } = options;
  if (options.memory === undefined && options.conversation === undefined) {
    throw invalidField("options", "has neither a memory nor a conversation");
  }
  if (historyMax !== undefined && !(Number.isSafeInteger(historyMax) && historyMax >= 0)) {
    throw invalidField("options.historyMax", `is ${String(historyMax)}, a number of messages is wanted`);
  }
  const session = new Session(client, options);
  return {
    specificationVersion: "v4",
    transformParams: ({ params }) => session.prepareCall(params),
    wrapGenerate: async ({ doGenerate, params }) => {
      const result = await doGenerate();
      await session.storeReply(params, result.content, result.finishReason.unified);
      return result;
    },
    wrapStream: async ({ doStream, params }) => {
      const result = await doStream();
      return { ...result, stream: result.stream.pipeThrough(session.storeStream(params)) };
    },
  };
}

/** What is known of a turn, from the user's message to the model's last reply to it. */
interface Turn {
  /** The messages up to that of the user. */
  readonly key: string;
  readonly question: string;
  /** Messages of the conversation that the application did not send. */
  readonly earlier: readonly Message[];
  readonly blocks: string;
  readonly evidence: string;
  /** How many of the messages that the application sent are stored. */
  stored: number;
}

class Session {
  private readonly conversation: Conversation | undefined;
  private readonly turns = new WeakMap<CallOptions, Turn>();
  /** Turns whose last reply is not there yet, by their keys. */
  private readonly open = new Map<string, Turn>();
  private readonly made = new Map<string, Promise<unknown>>();

  constructor(
    private readonly client: Client,
    private readonly options: MemoryOptions,
  ) {
    const { memory, conversation } = options;
    this.conversation = conversation === undefined ? undefined : client.conversation(conversation);
    if (memory !== undefined) client.memory(memory); // checks the path
  }

  /** Stores what is new, and returns the call with the earlier messages and what the memory knows. */
  async prepareCall(params: CallOptions): Promise<CallOptions> {
    const head = params.prompt.filter(({ role }) => role === "system");
    const given = params.prompt.filter(({ role }) => role !== "system");
    const asked = given.findLastIndex(({ role }) => role === "user");
    const key = given.slice(0, asked + 1).map(signatureOf).join("\n");
    const isLaterStep = given.length > asked + 1;
    const turn = (isLaterStep && this.open.get(key)) || (await this.beginTurn(given, asked, key, params.abortSignal));
    await this.append(given.slice(turn.stored));
    turn.stored = given.length;
    this.keepOpen(turn);
    const shown = given.map((message, place) => (place === asked ? withEvidence(message, turn.evidence) : message));
    const blocks: Message[] = turn.blocks === "" ? [] : [{ role: "system", content: turn.blocks }];
    const call = { ...params, prompt: [...head, ...blocks, ...turn.earlier, ...shown] };
    this.turns.set(call, turn);
    return call;
  }

  /** Stores a reply, unless it calls tools of the application or was cut off. */
  async storeReply(params: CallOptions, content: readonly Content[], reason: string): Promise<void> {
    const turn = this.turns.get(params);
    const callsTools = content.some((part) => part.type === "tool-call" && !part.providerExecuted);
    if (!turn || callsTools || ["error", "interrupted"].includes(reason)) return;
    const reply = toReply(content);
    if (reply.content.length > 0) await this.append([reply]);
    this.open.delete(turn.key);
    await this.observe(turn.question, textOf(reply));
  }

  /** Passes a stream on; stores the reply before the stream ends. */
  storeStream(params: CallOptions): TransformStream<StreamPart, StreamPart> {
    const content = new Map<string, Content>();
    let reason = "interrupted";
    return new TransformStream({
      transform: (part, controller) => {
        if (part.type === "finish") reason = part.finishReason.unified;
        else collectPart(content, part);
        controller.enqueue(part);
      },
      flush: () => this.storeReply(params, [...content.values()], reason),
    });
  }

  private keepOpen(turn: Turn): void {
    this.open.set(turn.key, turn);
    const [oldest] = this.open.keys();
    if (this.open.size > OPEN_MAX && oldest !== undefined) this.open.delete(oldest); // of turns that were cut off
  }

  private async beginTurn(given: Message[], asked: number, key: string, signal: AbortSignal | undefined): Promise<Turn> {
    const user = given[asked];
    const question = user ? textOf(user).slice(0, TEXT_MAX) : "";
    const [stored, known] = await Promise.all([this.loadHistory(), this.recall(question, signal)]);
    const covered = countCovered(stored.map(signatureOf), given.map(signatureOf));
    return { key, question, earlier: stored.slice(0, Math.max(0, stored.length - covered)), stored: covered, ...known };
  }

  private async loadHistory(): Promise<Message[]> {
    const { historyMax = HISTORY_MAX } = this.options;
    if (!this.conversation || historyMax === 0) return [];
    const bodies: string[] = [];
    try {
      for await (const { body } of this.conversation.messages({ newestFirst: true, pageSize: Math.min(historyMax, 100) })) {
        if (body !== undefined) bodies.push(body);
        if (bodies.length === historyMax) break;
      }
    } catch (error) {
      if (asError(error).reason !== ErrorReason.CONVERSATION_NOT_FOUND) throw error;
    }
    const messages = bodies.reverse().map(fromBody);
    const first = messages.findIndex(({ role }) => role === "user");
    return first < 0 ? [] : messages.slice(first);
  }

  private async recall(question: string, signal: AbortSignal | undefined): Promise<{ blocks: string; evidence: string }> {
    const { memory, blocks = [], budget } = this.options;
    const nothing = { blocks: "", evidence: "" };
    if ((memory === undefined && blocks.length === 0) || question.trim() === "") return nothing;
    const scopes = memory === undefined ? [] : [memory];
    const asked = { blocks, partial: true, signal, ...(budget !== undefined && { budget }) };
    const found = await this.tolerate(() => this.client.context(scopes, question, asked));
    const textsOf = (kind: ContextPartKind) => found?.parts.filter((part) => part.kind === kind).map(({ text }) => text) ?? [];
    return { blocks: textsOf(ContextPartKind.BLOCK).join("").trimEnd(), evidence: textsOf(ContextPartKind.EVIDENCE).join("") };
  }

  private async append(messages: readonly Message[]): Promise<void> {
    const { conversation } = this;
    if (!conversation || messages.length === 0) return;
    const bodies = messages.map((message) => ({ role: message.role, body: toJson(message) })); // all, before one is sent
    const { user } = this.options;
    if (user !== undefined) await this.once("conversation", () => labelUser(conversation, user));
    let part: typeof bodies = [];
    let size = 0;
    for (const each of bodies) {
      const bytes = Buffer.byteLength(each.body);
      if (part.length > 0 && size + bytes > CALL_BYTES_MAX) {
        await conversation.append(part);
        [part, size] = [[], 0];
      }
      part.push(each);
      size += bytes;
    }
    await conversation.append(part);
  }

  private async observe(question: string, reply: string): Promise<void> {
    const { memory, conversation = "" } = this.options;
    const said = [{ role: Role.USER, text: question }, { role: Role.ASSISTANT, text: reply.slice(0, TEXT_MAX) }];
    const observations = said.filter(({ text }) => text.trim() !== "").map(({ role, text }) => toObserved(text, role));
    if (memory === undefined || observations.length === 0) return;
    const session = conversation.slice(conversation.indexOf("/") + 1);
    await this.tolerate(async () => {
      await this.once("memory", () => this.client.ensureMemory(memory));
      const { rejected } = await this.client.memory(memory).observeBatch(observations, { session });
      for (const { status } of rejected) throw fromStatus(status);
    });
  }

  /** Does something once; again after a failure. */
  private async once(name: string, act: () => Promise<unknown>): Promise<void> {
    const running = this.made.get(name) ?? act();
    this.made.set(name, running);
    await running.catch((error: unknown) => {
      this.made.delete(name);
      throw error;
    });
  }

  private async tolerate<T>(act: () => Promise<T>): Promise<T | undefined> {
    try {
      return await act();
    } catch (error) {
      if (!this.options.onError) throw error;
      this.options.onError(error);
      return undefined;
    }
  }
}

function toObserved(text: string, role: Role) {
  return { role, body: { case: "content" as const, value: text } };
}

async function labelUser(conversation: Conversation, user: string): Promise<void> {
  try {
    await conversation.update({ labels: { labels: { user } }, existence: { case: "absent", value: true } });
  } catch (error) {
    if (asError(error).reason !== ErrorReason.MEMORY_EXISTS) throw error;
  }
}

function withEvidence(message: Message, evidence: string): Message {
  if (message.role !== "user" || evidence === "") return message;
  return { ...message, content: [{ type: "text", text: evidence }, ...message.content] };
}

/** Tools of `memstreamTools`, by their names. A type, because interfaces are no ToolSet. */
export type MemoryTools = {
  recall: Tool<{ query: string }, string>;
  observe: Tool<{ text: string }, string>;
  forget: Tool<{ ids: string[] }, string>;
};

/** Returns tools with which a model reads and writes the memory "namespace/name", which is created if it does not exist. */
export function memstreamTools(client: Client, memory: string): MemoryTools {
  const handle = client.memory(memory);
  let made: Promise<unknown> | undefined;
  const ready = async () => {
    made ??= client.ensureMemory(memory);
    await made.catch((error: unknown) => {
      made = undefined;
      throw error;
    });
  };
  return {
    recall: tool({
      description: "Recalls what the memory knows about a question: one line for each, `id date speaker: words`.",
      inputSchema: objectSchema<{ query: string }>({ query: text("The question, in full words.") }),
      execute: async ({ query }, { abortSignal }) => {
        await ready();
        const { recollections } = await handle.recallOnce(query, { signal: abortSignal });
        return recollections.flatMap(({ fragment }) => (fragment ? [lineOf(fragment)] : [])).join("\n") || "Nothing is known.";
      },
    }),
    observe: tool({
      description: "Stores a fact, a decision or a preference in the memory. Do not store keys, passwords or what changes soon.",
      inputSchema: objectSchema<{ text: string }>({ text: text("One fact, with names instead of pronouns.") }),
      execute: async (given) => {
        await ready();
        const { rejected } = await handle.observeBatch([given.text]);
        for (const { status } of rejected) throw fromStatus(status);
        return "Stored.";
      },
    }),
    forget: tool({
      description: "Forgets what is wrong or no longer wanted, by the ids that recall returned.",
      inputSchema: objectSchema<{ ids: string[] }>({ ids: { type: "array", items: { type: "string" }, minItems: 1 } }),
      execute: async ({ ids }) => {
        await ready();
        const { namespace, name } = handle.path;
        const { forgotten } = await client.memories.forgetFragments({ namespace, memory: name, ids });
        return `Forgot ${forgotten}.`;
      },
    }),
  };
}

type Properties = NonNullable<Exclude<Parameters<typeof jsonSchema>[0], PromiseLike<unknown> | (() => unknown)>["properties"]>;

function objectSchema<T>(properties: Properties) {
  return jsonSchema<T>({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
}

function text(description: string) {
  return { type: "string" as const, description, minLength: 1 };
}

/** `id date speaker: words`; further lines of the words are indented, so that no content can imitate another line. */
function lineOf({ id, speaker, observeTime, body }: Fragment): string {
  const day = observeTime ? timestampDate(observeTime).toISOString().slice(0, 10) : "";
  const words = body.case === "content" ? body.value : toJson({ ...body.value, $typeName: undefined });
  return `${[id, day, speaker].filter((part) => part !== "").join(" ")}: ${words.replaceAll("\n", "\n  ")}`;
}
