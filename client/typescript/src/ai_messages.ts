/** The messages of the AI SDK's prompts: as JSON, compared with what is stored, and made of a model's reply. */
import { createHash } from "node:crypto";

import type { LanguageModelMiddleware } from "ai";

type Middleware = Required<LanguageModelMiddleware>;
export type CallOptions = Parameters<Middleware["transformParams"]>[0]["params"];
export type Message = CallOptions["prompt"][number];
export type Content = Awaited<ReturnType<Middleware["wrapGenerate"]>>["content"][number];
export type StreamPart = Awaited<ReturnType<Middleware["wrapStream"]>>["stream"] extends ReadableStream<infer Part> ? Part : never;

/** How many of the given messages are stored: the end of what is stored is in them, or they begin with it. */
export function countCovered(stored: readonly string[], given: readonly string[]): number {
  const last = stored.length - 1;
  for (let count = given.length; count > 0 && last >= 0; count -= 1) {
    const compared = Math.min(count, stored.length);
    const isEqual = (back: number) => given[count - 1 - back] === stored[last - back];
    if (Array.from({ length: compared }, (_, back) => back).every(isEqual)) return count;
  }
  return 0;
}

/** What two forms of the same message have in common: role, text, ids of tool calls, and files. */
export function signatureOf(message: Message): string {
  if (message.role === "system") return message.content;
  const marks = message.content.map((part) => {
    if (part.type === "tool-call" || part.type === "tool-result") return `${part.type} ${part.toolCallId}`;
    if (part.type === "file") return createHash("sha256").update(toJson(part.data)).digest("hex");
    return part.type === "text" || part.type === "reasoning" ? "" : part.type;
  });
  return JSON.stringify([message.role, textOf(message), ...marks.filter((mark) => mark !== "")]);
}

export function textOf(message: Message): string {
  if (message.role === "system") return message.content;
  return message.content.map((part) => (part.type === "text" ? part.text : "")).join("");
}

/** JSON as the AI SDK sends it to a model, with bytes in base64. Throws TypeError for what JSON does not have. */
export function toJson(value: unknown): string {
  return JSON.stringify(value, function (this: Record<string, unknown>, key: string, given: unknown) {
    const own = this[key]; // before a Buffer's toJSON
    return own instanceof Uint8Array ? Buffer.from(own).toString("base64") : given;
  });
}

type Json = Record<string, unknown>;

/** The message of a body; the addresses of files are URLs again. */
export function fromBody(body: string): Message {
  const message = JSON.parse(body) as Json;
  if (Array.isArray(message["content"])) message["content"].forEach(reviveFile);
  return message as unknown as Message;
}

function reviveFile(part: Json): void {
  const { data, output } = part as { data?: Json; output?: Json };
  if (data?.["type"] === "url" && typeof data["url"] === "string") data["url"] = new URL(data["url"]);
  if (output?.["type"] === "content" && Array.isArray(output["value"])) output["value"].forEach(reviveFile);
}

type Reply = Extract<Message, { role: "assistant" }>;

/** The message of a model's reply, as the AI SDK sends it in the next call. */
export function toReply(content: readonly Content[]): Reply {
  return { role: "assistant", content: content.flatMap(toParts) };
}

function toParts(part: Content): Reply["content"] {
  const metadata = "providerMetadata" in part ? { providerOptions: part.providerMetadata } : {};
  switch (part.type) {
    case "text":
      return part.text === "" ? [] : [{ type: "text", text: part.text, ...metadata }];
    case "reasoning":
      return [{ type: "reasoning", text: part.text, ...metadata }];
    case "file":
      return [{ type: "file", mediaType: part.mediaType, data: part.data, ...metadata }];
    case "tool-call": {
      const { toolCallId, toolName, input } = part;
      return [{ type: "tool-call", toolCallId, toolName, input: JSON.parse(input || "{}"), providerExecuted: true, ...metadata }];
    }
    case "tool-result": {
      const { toolCallId, toolName, result, isError } = part;
      const output = { type: isError ? ("error-json" as const) : ("json" as const), value: result };
      return [{ type: "tool-result", toolCallId, toolName, output, ...metadata }];
    }
    default:
      return []; // sources and requests of approval are not part of a prompt
  }
}

/** Adds a part of a stream to the reply. */
export function collectPart(content: Map<string, Content>, part: StreamPart): void {
  switch (part.type) {
    case "text-start":
    case "reasoning-start":
      content.set(`${part.type} ${part.id}`, { type: part.type === "text-start" ? "text" : "reasoning", text: "" });
      break;
    case "text-delta":
    case "reasoning-delta":
    case "text-end":
    case "reasoning-end": {
      const kind = part.type.startsWith("text") ? "text" : "reasoning";
      const found = content.get(`${kind}-start ${part.id}`);
      if (found?.type !== "text" && found?.type !== "reasoning") return;
      if ("delta" in part) found.text += part.delta;
      if (part.providerMetadata) found.providerMetadata = part.providerMetadata;
      break;
    }
    case "file":
    case "tool-call":
    case "tool-result":
      content.set(`part ${content.size}`, part);
  }
}
