/** The context of an agent's turn: its parts, the forms that model APIs take, and the record of the turn. */
import { createHash } from "node:crypto";

import type { MessageInitShape } from "@bufbuild/protobuf";
import { durationFromMs, timestampFromDate } from "@bufbuild/protobuf/wkt";

import { checkedMessage, checkOptions } from "./checks.js";
import { Conversation } from "./conversation.js";
import { fromStatus, invalidField, protocolViolationError } from "./errors.js";
import { ContextPartKind, ContextRequestSchema } from "./gen/memstream/v1/context_service_pb.js";
import type {
  ContextCitation,
  ContextCorrection,
  ContextOmission,
  ContextPart,
  ContextRequest,
  ContextResponse,
  TokenBoundsSchema,
} from "./gen/memstream/v1/context_service_pb.js";
import { Role } from "./gen/memstream/v1/fragment_pb.js";
import type { FragmentFilterSchema } from "./gen/memstream/v1/fragment_pb.js";
import { AckLevel } from "./gen/memstream/v1/stream_service_pb.js";
import { memoryPath } from "./link.js";
import type { Link } from "./link.js";
import { QUERY_OPTIONS } from "./observe.js";
import type { QueryOptions } from "./observe.js";

/** Bounds of a part in tokens: the other parts leave it `minimum`, and it takes `maximum` at most. */
export type TokenBounds = MessageInitShape<typeof TokenBoundsSchema>;

/** Options of `Client.context`. */
export interface ContextOptions extends QueryOptions {
  /** The conversation, as "namespace/name". */
  readonly conversation?: string;
  /** Blocks, each as "namespace/memory#name", in their order. */
  readonly blocks?: readonly string[];
  /** The block that replaces the messages that are cut, as "namespace/memory#name". */
  readonly summary?: string;
  /** Most tokens of the whole text. Default 4,000. */
  readonly budget?: number;
  /** The context of the turn before, or its `position`. */
  readonly after?: Context | Uint8Array | undefined;
  /** Leaves out named memories and blocks that do not exist or that you may not recall. */
  readonly partial?: boolean;
  /** Bounds of all blocks together. */
  readonly blockTokens?: TokenBounds;
  /** Bounds of the messages with the memories between them. */
  readonly tailTokens?: TokenBounds;
  /** Bounds of new memories. */
  readonly evidenceTokens?: TokenBounds;
  /** How the server counts tokens. Default: bytes of UTF-8 / 4. */
  readonly tokenizer?: string;
  /** Most tokens of one memory; a longer one is cut to the sentences that share most words with the question. */
  readonly memoryTokens?: number;
  /** Most new memories. */
  readonly limit?: number;
  /** Filter of all memories in the text. */
  readonly filter?: MessageInitShape<typeof FragmentFilterSchema>;
  /** The time of the turn. Default: the server's clock. */
  readonly now?: Date;
  /** The time zone of dates. Default UTC. */
  readonly timeZone?: string;
  /** Whether the recall is an access. Default: by policy. */
  readonly reinforce?: boolean;
  /** Keeps a receipt of the recall of each memory. */
  readonly receipt?: boolean;
  /** Your own embedding of the question. */
  readonly embedding?: readonly number[];
  /** What is not read by then is missing, and named in `degraded`. Default 2 s. */
  readonly partsTimeoutMs?: number;
}

export const CONTEXT_OPTIONS = {
  conversation: true, blocks: true, summary: true, budget: true, after: true, partial: true, blockTokens: true, tailTokens: true,
  evidenceTokens: true, tokenizer: true, memoryTokens: true, limit: true, filter: true, now: true,
  timeZone: true, reinforce: true, receipt: true, embedding: true, partsTimeoutMs: true, ...QUERY_OPTIONS,
} as const;

/** Returns the request of a turn, without scopes. */
export function toContextRequest(question: string, options: Omit<ContextOptions, keyof QueryOptions>): ContextRequest {
  const { after, now, partsTimeoutMs, blocks = [], embedding = [], ...fields } = options;
  if (now !== undefined && !(now instanceof Date && Number.isFinite(now.getTime()))) {
    throw invalidField("options.now", "is no valid Date");
  }
  if (partsTimeoutMs !== undefined && !(Number.isFinite(partsTimeoutMs) && partsTimeoutMs >= 0)) {
    throw invalidField("options.partsTimeoutMs", `is ${String(partsTimeoutMs)}, milliseconds are wanted`);
  }
  return checkedMessage("options", ContextRequestSchema, {
    ...fields,
    question,
    blocks: copied(blocks),
    embedding: copied(embedding),
    ...(after !== undefined && { after: after instanceof Context ? after.position : after }),
    ...(now && { now: timestampFromDate(now) }),
    ...(partsTimeoutMs !== undefined && { timeout: durationFromMs(Math.round(partsTimeoutMs)) }),
  });
}

/** Copies an array; any other value stays, so that the check of the message names it. */
function copied<T>(values: readonly T[]): T[] {
  return Array.isArray(values) ? Array.from(values as readonly T[]) : (values as T[]);
}

/** A text, and whether a model's prompt cache is to keep what ends with it: the form that Anthropic's API takes. */
export interface AnthropicText {
  type: "text";
  text: string;
  cache_control?: { type: "ephemeral" };
}

/** A message of a user or an assistant. */
export interface ModelMessage<Role extends string, Content> {
  role: Role;
  content: Content;
}

type TurnRole = "user" | "assistant";

/** Arguments of Anthropic's `messages.create`. */
export interface AnthropicContext {
  system?: AnthropicText[];
  messages: ModelMessage<TurnRole, AnthropicText[]>[];
}

/** Arguments of OpenAI's `responses.create`. */
export interface OpenAIContext {
  instructions?: string;
  input: ModelMessage<TurnRole, string>[];
  prompt_cache_key?: string;
}

/** Arguments of OpenAI's `chat.completions.create`. */
export interface OpenAIChatContext {
  messages: ModelMessage<"system" | TurnRole, string>[];
  prompt_cache_key?: string;
}

/** Options of `toAnthropic`, `toOpenAI` and `toOpenAIChat`. */
export interface RenderOptions {
  /** Your system prompt; the blocks follow it. */
  readonly system?: string;
}

/** Options of `Context.record`. */
export interface RecordOptions {
  /** The memory that observes the turn, as "namespace/name". Default: the first that the scopes name. */
  readonly memory?: string;
}

interface Turn {
  readonly role: TurnRole;
  readonly text: string;
  /** Whether it is not in the text of the turn before. */
  readonly fresh: boolean;
}

/** The context of a turn, created by `Client.context`. */
export class Context {
  /** The parts in order; their texts are `text`. */
  readonly parts: readonly ContextPart[];
  /** Tokens of all parts. */
  readonly tokens: number;
  /** Tokens at the beginning that are as in the turn before. */
  readonly unchangedTokens: number;
  /** Why the text does not begin with that of the turn before. */
  readonly brokenBy: readonly ContextOmission[];
  /** What was found and is not in the text. */
  readonly leftOut: readonly ContextOmission[];
  /** The memories in the text. */
  readonly citations: readonly ContextCitation[];
  /** Memories that an earlier turn showed and that others supersede now. */
  readonly corrections: readonly ContextCorrection[];
  /** Whether nothing is known; the text says so. */
  readonly weak: boolean;
  /** What is missing, and why; empty if nothing is. */
  readonly degraded: string;
  /** For `after` of the next turn. */
  readonly position: Uint8Array;
  /** Receipts of the recall by memory, if they were requested. */
  readonly receipts: ReadonlyMap<string, string>;

  private readonly conversation: string;
  private readonly memory: string;

  constructor(private readonly link: Link, request: ContextRequest, answer: ContextResponse) {
    this.parts = answer.parts;
    this.tokens = answer.tokens;
    this.unchangedTokens = answer.unchangedTokens;
    this.brokenBy = answer.brokenBy;
    this.leftOut = answer.leftOut;
    this.citations = answer.citations;
    this.corrections = answer.corrections;
    this.weak = answer.weak;
    this.degraded = answer.degraded;
    this.position = answer.position;
    this.receipts = new Map(answer.receipts.map(({ memory, receiptId }) => [memory, receiptId]));
    this.conversation = request.conversation;
    this.memory = request.scopes.map(({ memories }) => (memories.case === "memory" ? memories.value : "")).find(Boolean) ?? "";
  }

  /** All parts, for a model that takes one text. */
  get text(): string {
    return this.parts.map((part) => part.text).join("");
  }

  /**
   * Arguments of Anthropic's `messages.create`: `system` (yours, then the blocks) and `messages`. Cache markers are set
   * after the blocks, after what the turn before had, and at the end: three of the four that the API allows.
   */
  toAnthropic(options: RenderOptions = {}): AnthropicContext {
    const system = this.head(options).map((text): AnthropicText => ({ type: "text", text }));
    const messages: AnthropicContext["messages"] = [];
    let lastKnown: AnthropicText | undefined;
    for (const { role, text, fresh } of this.turns()) {
      if (messages.length === 0 && role === "assistant") { // the API wants the user first
        messages.push({ role: "user", content: [{ type: "text", text: "..." }] });
      }
      const block: AnthropicText = { type: "text", text };
      const last = messages.at(-1);
      if (last?.role === role) last.content.push(block);
      else messages.push({ role, content: [block] });
      if (!fresh) lastKnown = block;
    }
    for (const cached of [system.at(-1), lastKnown, messages.at(-1)?.content.at(-1)]) {
      if (cached) cached.cache_control = { type: "ephemeral" };
    }
    return { ...(system.length > 0 && { system }), messages };
  }

  /**
   * Arguments of OpenAI's `responses.create`: `instructions`, `input`, and `prompt_cache_key` if there is a conversation.
   * The API caches the longest known beginning without a marker.
   */
  toOpenAI(options: RenderOptions = {}): OpenAIContext {
    const instructions = this.head(options).join("\n\n");
    const input = this.turns().map(({ role, text }) => ({ role, content: text }));
    return { ...(instructions !== "" && { instructions }), input, ...this.cacheKey() };
  }

  /** The same for `chat.completions.create`: `messages`, and `prompt_cache_key`. */
  toOpenAIChat(options: RenderOptions = {}): OpenAIChatContext {
    const head = this.head(options).join("\n\n");
    const turns = this.turns().map(({ role, text }) => ({ role, content: text }));
    const system = { role: "system" as const, content: head };
    return { messages: head === "" ? turns : [system, ...turns], ...this.cacheKey() };
  }

  /**
   * Stores question and reply in the conversation and in a memory. A repeat with the same texts stores nothing again.
   * Pass the question alone, without the context's text.
   */
  async record(question: string, reply: string, options: RecordOptions = {}): Promise<void> {
    checkOptions("options", options, { memory: true });
    const memory = options.memory ?? this.memory;
    if (memory === "" && this.conversation === "") {
      throw invalidField("options.memory", "is needed: there is neither a conversation nor a memory to record the turn in");
    }
    const turn = digest(this.position, "\0", question, "\0", reply);
    if (memory !== "") await this.observeTurn(memory, turn, question, reply);
    if (this.conversation !== "") {
      await new Conversation(this.link, memoryPath(this.conversation, "conversation")).append([
        { role: "user", content: question, clientId: `${turn}-question` },
        { role: "assistant", content: reply, clientId: `${turn}-reply` },
      ]);
    }
  }

  private async observeTurn(path: string, turn: string, question: string, reply: string): Promise<void> {
    const { namespace, name } = memoryPath(path);
    const { ack } = await this.link.streams.observeBatch({
      namespace,
      memory: name,
      session: this.conversation.slice(this.conversation.indexOf("/") + 1),
      requestId: `turn-${turn}`,
      ackLevel: AckLevel.STORED, // as the Python SDK sets it: a repeat from there is the same request
      observations: [
        { role: Role.USER, body: { case: "content", value: question } },
        { role: Role.ASSISTANT, body: { case: "content", value: reply } },
      ],
    });
    if (!ack) throw protocolViolationError("the server's answer is incomplete");
    for (const { status } of ack.rejected) throw fromStatus(status);
  }

  /** The system prompt and the blocks that have a text. */
  private head(options: RenderOptions): string[] {
    checkOptions("options", options, { system: true });
    const blocks = this.parts.filter((part) => part.kind === ContextPartKind.BLOCK).map((part) => withoutEndLines(part.text));
    return [options.system ?? "", ...blocks].filter((text) => text !== "");
  }

  /** What user and assistant say. APIs know tool results only with their calls: here these are texts of the user. */
  private turns(): Turn[] {
    return this.parts.flatMap((part): Turn[] => {
      if (part.kind === ContextPartKind.BLOCK) return [];
      const plain = part.role === "user" || part.role === "assistant";
      const text = plain && part.kind !== ContextPartKind.EVIDENCE ? contentOf(part) : withoutEndLines(part.text);
      return VISIBLE.test(text) ? [{ role: part.role === "assistant" ? "assistant" : "user", text, fresh: part.fresh }] : [];
    });
  }

  private cacheKey(): { prompt_cache_key?: string } {
    return this.conversation === "" ? {} : { prompt_cache_key: `memstream-${digest(this.conversation)}` };
  }
}

/** A character that is not blank: as `str.strip` of Python says, so that all SDKs send a model the same turns. */
// eslint-disable-next-line no-control-regex -- Unicode's separators of information are blank there too
const VISIBLE = /[^\p{White_Space}\u001c-\u001f]/u;

/** The text without its label and the empty line at its end. */
function contentOf({ text, labelBytes }: ContextPart): string {
  const content = Buffer.from(text, "utf8").subarray(labelBytes).toString("utf8");
  return content.endsWith("\n\n") ? content.slice(0, -2) : content;
}

function withoutEndLines(text: string): string {
  let end = text.length;
  while (text[end - 1] === "\n") end -= 1;
  return text.slice(0, end);
}

/** 24 hexadecimal digits, the same in every SDK. */
function digest(...parts: readonly (string | Uint8Array)[]): string {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest("hex").slice(0, 24);
}
