/**
 * OpenTelemetry spans of a client's calls. It needs the package @opentelemetry/api:
 *
 *     const client = connect(target, { tracing: tracing() });
 *
 * Each unary call is a span, with its retries; each connection of a stream is a span, the parent of the server's spans.
 * What a call or a message of a stream does to a memory is a span by OpenTelemetry's conventions for generative AI (in
 * development): search_memory, create_memory and so on, with gen_ai.memory.store.id (NAMESPACE/MEMORY), the number of
 * records, and gen_ai.conversation.id (the session or conversation). Of a call it is above the call's span, of a query on a
 * stream below the span of its caller and above the server's, of another message of a stream below the stream's. It has
 * texts only if OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT is true. No other span has the name of a memory, or an
 * id.
 */
import { create } from "@bufbuild/protobuf";
import type {
  DescMessage, DescMethodStreaming, DescMethodUnary, Message, MessageInitShape,
} from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import type { ContextValues, StreamResponse, Transport, UnaryResponse } from "@connectrpc/connect";
import { context, SpanKind, SpanStatusCode, trace } from "@opentelemetry/api";
import type { Attributes, Context, Span, Tracer, TracerProvider } from "@opentelemetry/api";

import { MemstreamError } from "./errors.js";
import { ErrorReason } from "./gen/memstream/v1/error_pb.js";
import type { TransportOfCallers } from "./link.js";

type HeadersInit = ConstructorParameters<typeof Headers>[0];
type Fields = Readonly<Record<string, unknown>>;
/** The memory and the session of a stream. */
interface Place { readonly namespace: string; readonly memory: string; readonly session: string }

const NOWHERE: Place = { namespace: "", memory: "", session: "" };
/** The operations of the conventions, by the message that asks for one, without "Request". */
const OPERATIONS: Readonly<Record<string, string>> = {
  ClearMemory: "delete_memory",
  CloneMemory: "create_memory_store",
  Context: "search_memory",
  ContextQuery: "search_memory",
  CreateMemory: "create_memory_store",
  DeleteBlock: "delete_memory",
  DeleteMemory: "delete_memory_store",
  EditBlock: "update_memory",
  EraseFragments: "delete_memory",
  ForgetFragments: "delete_memory",
  ObservationBatch: "create_memory",
  ObserveBatch: "create_memory",
  PutBlock: "upsert_memory",
  PutFragment: "upsert_memory",
  RecallOnce: "search_memory",
  RecallQuery: "search_memory",
  RestoreFragmentVersion: "update_memory",
  RestoreFragments: "update_memory",
  SupersedeFragments: "update_memory",
  UpdateFragment: "update_memory",
};
const CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT";

/** Makes spans of the calls of a client with `provider`; the default is the global one. */
export function tracing(provider?: TracerProvider): (transport: Transport) => Transport {
  const tracer = (provider ?? trace.getTracerProvider()).getTracer("memstream");
  return (transport) => new TracedTransport(transport, tracer);
}

class TracedTransport implements TransportOfCallers {
  /** The contexts in which queries were asked, by their message. */
  private readonly callers = new WeakMap<object, Context>();

  constructor(private readonly inner: Transport, private readonly tracer: Tracer) {}

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: MessageInitShape<I>,
    contextValues?: ContextValues,
  ): Promise<UnaryResponse<I, O>> {
    const message = create(method.input, input);
    const described = describe(message, NOWHERE);
    const memory = described && startSpan(this.tracer, described.operation, described.attributes, context.active());
    const [call, headers] = this.call(method.name, header, memory?.context ?? context.active());
    try {
      const answer = await this.inner.unary(method, signal, timeoutMs, headers, message, contextValues);
      memory?.span.setAttributes(describeAnswer(answer.message));
      endSpan(call.span);
      if (memory) endSpan(memory.span);
      return answer;
    } catch (error) {
      endSpan(call.span, error);
      if (memory) endSpan(memory.span, error);
      throw error;
    }
  }

  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodStreaming<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: AsyncIterable<MessageInitShape<I>>,
    contextValues?: ContextValues,
  ): Promise<StreamResponse<I, O>> {
    const [call, headers] = this.call(method.name, header, context.active());
    const messages = new StreamMessages(this.tracer, call, this.callers);
    try {
      const sent = messages.sent(input);
      const opened = await this.inner.stream(method, signal, timeoutMs, headers, sent, contextValues);
      return { ...opened, message: messages.received(opened.message) };
    } catch (error) {
      messages.finish(error);
      throw error;
    }
  }

  noteCaller(query: object): void {
    this.callers.set(query, context.active());
  }

  /** The span of a call, and headers that propagate it (W3C traceparent). */
  private call(name: string, header: HeadersInit | undefined, parent: Context): [Started, Headers] {
    const started = startSpan(this.tracer, `memstream.v1/${name}`, { "rpc.system": "grpc", "rpc.method": name }, parent);
    const headers = new Headers(header);
    headers.set("traceparent", traceparentOf(started.span));
    return [started, headers];
  }
}

interface Started { readonly span: Span; readonly context: Context }

function startSpan(tracer: Tracer, name: string, attributes: Attributes, parent: Context): Started {
  const span = tracer.startSpan(name, { kind: SpanKind.CLIENT, attributes }, parent);
  return { span, context: trace.setSpan(parent, span) };
}

/** The span as W3C trace context. */
function traceparentOf(span: Span): string {
  const { traceId, spanId, traceFlags } = span.spanContext();
  return `00-${traceId}-${spanId}-${traceFlags.toString(16).padStart(2, "0")}`;
}

/** Ends a span. Of an error it has the reason or the code, and no text. */
function endSpan(span: Span, error?: unknown): void {
  if (error !== undefined) {
    let kind = error instanceof Error ? error.name : "error";
    if (error instanceof MemstreamError) {
      kind = error.reason === ErrorReason.UNSPECIFIED ? Code[error.code] : ErrorReason[error.reason];
    } else if (error instanceof ConnectError) kind = Code[error.code];
    span.setAttribute("error.type", kind);
    span.setStatus({ code: SpanStatusCode.ERROR });
  }
  span.end();
}

/** Spans of the messages of one connection that do something to a memory. */
class StreamMessages {
  private place = NOWHERE;
  /** Those of queries in flight, by query_id. */
  private readonly queries = new Map<string, Span>();

  constructor(
    private readonly tracer: Tracer, private readonly call: Started, private readonly callers: WeakMap<object, Context>,
  ) {}

  async *sent<M>(input: AsyncIterable<M>): AsyncIterable<M> {
    for await (const given of input) {
      const one = caseOf(given as Fields);
      if (one.name === "open") {
        const { namespace, memory, session } = one.value;
        this.place = { namespace: text(namespace), memory: text(memory), session: text(session) };
      }
      const described = describe(one.value as unknown as Message, this.place);
      if (!described) {
        yield given;
        continue;
      }
      const parent = this.callers.get(one.value) ?? this.call.context;
      const { span } = startSpan(this.tracer, described.operation, described.attributes, parent);
      if (one.name === "batch") {
        yield given;
        endSpan(span);
      } else {
        this.queries.set(text(one.value["queryId"]), span);
        yield { ...given, traceparent: traceparentOf(span) };
      }
    }
  }

  async *received<M>(messages: AsyncIterable<M>): AsyncIterable<M> {
    try {
      for await (const message of messages) {
        this.answer(caseOf(message as Fields));
        yield message;
      }
      this.finish();
    } catch (error) {
      this.finish(error);
      throw error;
    } finally {
      this.finish();
    }
  }

  /** Ends the spans of the stream and of the queries in flight. */
  finish(error?: unknown): void {
    for (const span of this.queries.values()) endSpan(span, error);
    this.queries.clear();
    if (this.call.span.isRecording()) endSpan(this.call.span, error);
  }

  /** Ends the span of a query at its first answer: a standing query has more of them. */
  private answer({ name, value }: { name: string; value: Fields }): void {
    const id = text(value["queryId"]);
    const span = this.queries.get(id);
    if (!span) return;
    if (name === "recollections" || name === "context") {
      span.setAttributes(describeAnswer((name === "context" ? value["response"] : value) as Message));
    }
    if (name === "failed") endSpan(span, new Error("failed"));
    else if (name === "done" || name === "context" || value["done"] !== undefined) endSpan(span);
    else return;
    this.queries.delete(id);
  }
}

/** The message of a stream's request or response. */
function caseOf(given: Fields): { name: string; value: Fields } {
  const found = given["message"] as { case?: string; value?: Fields } | undefined;
  return { name: found?.case ?? "", value: found?.value ?? {} };
}

const text = (value: unknown): string => (typeof value === "string" ? value : "");
const texts = (value: unknown): string[] => (Array.isArray(value) ? value.map(text).filter((one) => one !== "") : []);
const fields = (value: unknown): Fields => (typeof value === "object" && value !== null ? (value as Fields) : {});

/** Whether spans may have texts: by default they have none. */
function capturesContent(): boolean {
  return ["true", "1", "span_only", "span_and_event"].includes((process.env[CONTENT] ?? "").toLowerCase());
}

/** What a message does to a memory; undefined for one that does nothing. */
function describe(message: Message, stream: Place): { operation: string; attributes: Attributes } | undefined {
  const type = text(fields(message)["$typeName"]).split(".").at(-1) ?? "";
  let operation = OPERATIONS[type.replace(/Request$/, "")];
  if (operation === undefined) return undefined;
  const whole = fields(message);
  const request = type === "ContextQuery" ? fields(whole["request"]) : whole;
  const written = listWritten(request);
  if (operation === "create_memory" && written.some((one) => text(one["externalId"]) !== "")) {
    operation = "upsert_memory"; // an existing external_id is replaced
  }
  const ids = listIds(request);
  const query = type === "RecallQuery" ? request : fields(request["query"]);
  const attributes: Attributes = {
    "gen_ai.operation.name": operation,
    "gen_ai.provider.name": "memstream",
    "gen_ai.memory.store.id": storeOf(request, query, stream),
    "gen_ai.conversation.id": text(request["conversation"]) || text(request["session"]) || stream.session,
    "gen_ai.memory.record.id": ids.length === 1 ? ids[0] : "",
    "gen_ai.memory.record.count": written.length || ids.length || "",
  };
  if (capturesContent()) {
    attributes["gen_ai.memory.query.text"] = contentOf(query) || text(request["question"]);
    attributes["gen_ai.memory.records"] = encode(written.map((one) => [one, text(one["externalId"])]));
  }
  return { operation, attributes: Object.fromEntries(Object.entries(attributes).filter(([, value]) => value !== "")) };
}

/** The number of records of a search, and their texts if they are captured. */
function describeAnswer(answer: Message): Attributes {
  const found = fields(answer);
  const type = text(found["$typeName"]);
  if (type.endsWith(".ContextResponse")) {
    const parts = (found["parts"] as Fields[]).map((part) => texts(part["fragmentIds"]).length);
    return { "gen_ai.memory.record.count": parts.reduce((sum, one) => sum + one, 0) };
  }
  if (type.endsWith(".RecallOnceResponse")) return describeAnswer(found["recollections"] as Message);
  if (!type.endsWith(".Recollections")) return {};
  const hits = found["recollections"] as Fields[];
  const attributes: Attributes = { "gen_ai.memory.record.count": hits.length };
  if (hits.length > 0 && capturesContent()) {
    const records = hits.map((one) => [fields(one["fragment"]), text(fields(one["fragment"])["id"]), one["score"]] as const);
    attributes["gen_ai.memory.records"] = encode(records);
  }
  return attributes;
}

/** The text of an observation, a fragment or a query, whose oneof holds it. */
function contentOf(record: Fields): string {
  for (const name of ["body", "observation"]) {
    const chosen = fields(record[name]);
    if (typeof chosen["value"] === "string") return chosen["value"];
  }
  return text(record["content"]);
}

/** JSON by the conventions' schema of memory records; empty for none. */
function encode(records: readonly (readonly [Fields, string, unknown?])[]): string {
  if (records.length === 0) return "";
  return JSON.stringify(records.map(([record, id, score]) => ({ content: contentOf(record), id: id || undefined, score })));
}

function listWritten(request: Fields): Fields[] {
  if (Array.isArray(request["observations"])) return request["observations"] as Fields[];
  const one = fields(request["observation"]);
  return "$typeName" in one ? [one] : [];
}

function listIds(request: Fields): string[] {
  const several = [...texts(request["ids"]), ...texts(request["externalIds"])];
  if (several.length > 0) return several;
  return texts([request["id"], request["block"], fields(request["fragment"])["id"]]);
}

/** NAMESPACE/MEMORY; empty if the message asks several memories. */
function storeOf(request: Fields, query: Fields, stream: Place): string {
  const scopes = Array.isArray(query["scopes"]) ? (query["scopes"] as Fields[]) : [];
  if (scopes.length > 0) return scopes.length === 1 ? text(scopes[0]?.["memory"]) : "";
  const namespace = text(request["namespace"]) || stream.namespace;
  const memory = text(request["memory"]) || stream.memory;
  return namespace && memory ? `${namespace}/${memory}` : "";
}
