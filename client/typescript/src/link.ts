/** The connection: how it is configured, what every call sends, and errors turned into one kind. */
import { randomUUID } from "node:crypto";
import type * as http2 from "node:http2";
import { setTimeout as sleep } from "node:timers/promises";

import { clone } from "@bufbuild/protobuf";
import type { DescMessage, Message } from "@bufbuild/protobuf";
import type { Duration } from "@bufbuild/protobuf/wkt";
import { Code, createClient } from "@connectrpc/connect";
import type { Client, Interceptor, UnaryRequest } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { RETRY } from "./backoff.js";
import type { Retry } from "./backoff.js";
import { aborted } from "./changes.js";
import { asError, invalid } from "./errors.js";
import { ConversationService } from "./gen/memstream/v1/conversation_service_pb.js";
import { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import { StreamService } from "./gen/memstream/v1/stream_service_pb.js";

const ROUTING_KEY = "memstream-memory";
const NAME = /^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$/;
const ATTEMPTS = 5;
/** What a server takes in one message, unless it is set otherwise. */
export const WRITE_BYTES_MAX = 16 << 20;

/** How to connect. */
export interface Settings {
  /** Sent as a bearer token with every call. */
  readonly token?: string;
  /** Encrypts; `cert` and `key` make it mutual. `true` takes the system's roots. Default plain text. */
  readonly tls?: boolean | Pick<http2.SecureClientSessionOptions, "ca" | "cert" | "key" | "servername">;
  /** Bounds every unary call, and every query without a signal. Default 30 s. */
  readonly timeoutMs?: number;
  /** How long streams try to reconnect. */
  readonly retry?: Partial<Retry>;
  /** The time after which a silent connection is probed. Default 60 s. */
  readonly keepaliveMs?: number;
  /**
   * Bytes of one message sent; a larger one fails with RESOURCE_EXHAUSTED. Default 16 MiB, as the server takes: a message
   * the server refuses for its size is never read to its end, and the transport would wait for that until the time limit.
   */
  readonly writeBytesMax?: number;
}

/** A memory by namespace and name. */
export interface MemoryPath {
  readonly namespace: string;
  readonly name: string;
}

/** Of "namespace/name"; checked here because a routing header cannot carry anything else. */
export function memoryPath(path: string): MemoryPath {
  const [namespace = "", name = "", ...more] = path.split("/");
  if (more.length > 0 || !NAME.test(namespace) || !NAME.test(name)) {
    throw invalid("memory", `"${path}" is not "namespace/name" of letters, digits, "-", "_", "." and "~"`);
  }
  return { namespace, name };
}

export function durationMs(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) * 1e3 + duration.nanos / 1e6 : 0;
}

/** A connection and its generated clients. */
export class Link {
  readonly streams: Client<typeof StreamService>;
  readonly memories: Client<typeof MemoryService>;
  readonly conversations: Client<typeof ConversationService>;
  readonly operations: Client<typeof OperationService>;
  readonly server: Client<typeof ServerService>;
  readonly timeoutMs: number;
  readonly retry: Retry;

  private readonly sessions: Http2SessionManager;

  constructor(target: string, settings: Settings) {
    this.timeoutMs = settings.timeoutMs ?? 30_000;
    this.retry = { ...RETRY, ...settings.retry };
    const tls = settings.tls === true ? {} : settings.tls;
    const baseUrl = `${tls ? "https" : "http"}://${target}`;
    this.sessions = new Http2SessionManager(
      baseUrl,
      { pingIntervalMs: settings.keepaliveMs ?? 60_000, pingTimeoutMs: 20_000 },
      tls ? { ...tls } : {},
    );
    const transport = createGrpcTransport({
      baseUrl,
      sessionManager: this.sessions,
      interceptors: [authorized(settings.token), unary(this.timeoutMs)],
      readMaxBytes: 64 << 20,
      writeMaxBytes: settings.writeBytesMax ?? WRITE_BYTES_MAX,
    });
    this.streams = createClient(StreamService, transport);
    this.memories = createClient(MemoryService, transport);
    this.conversations = createClient(ConversationService, transport);
    this.operations = createClient(OperationService, transport);
    this.server = createClient(ServerService, transport);
  }

  /** The header that says which memory a stream is of, for consistent-hash routing. */
  route(memory: MemoryPath): Record<string, string> {
    return { [ROUTING_KEY]: `${memory.namespace}/${memory.name}` };
  }

  /** Ends the connection and every stream on it. */
  close(): void {
    this.sessions.abort();
  }
}

function authorized(token: string | undefined): Interceptor {
  return (next) => (request) => {
    if (token !== undefined) request.header.set("authorization", `Bearer ${token}`);
    return next(request);
  };
}

/** What unary calls have beside: the routing header, a time limit, a request_id, repeats, and typed errors. */
function unary(timeoutMs: number): Interceptor {
  return (next) => async (request) => {
    if (request.stream) return next(request);
    const named: Readonly<Record<string, unknown>> = { ...request.message };
    const { namespace, memory } = named;
    if (typeof namespace === "string" && typeof memory === "string" && NAME.test(namespace) && NAME.test(memory)) {
      if (!request.header.has(ROUTING_KEY)) request.header.set(ROUTING_KEY, `${namespace}/${memory}`);
    }
    const asked = withRequestId(request);
    if (request.header.has("grpc-timeout")) return repeated(() => next(asked), request.signal);
    request.header.set("grpc-timeout", `${timeoutMs}m`);
    const late = AbortSignal.timeout(timeoutMs);
    const limited = { ...asked, signal: AbortSignal.any([request.signal, late]) };
    return repeated(() => next(limited), limited.signal).catch((thrown: unknown) => {
      throw late.aborted && !request.signal.aborted ? aborted(late) : asError(thrown);
    });
  };
}

/** A request that can have a request_id and has none gets a fresh one, so that repeats of the call are harmless. */
function withRequestId<I extends DescMessage, O extends DescMessage>(request: UnaryRequest<I, O>): UnaryRequest<I, O> {
  const message: Message & { requestId?: unknown } = request.message;
  if (message.requestId !== "") return request;
  const copy: Message & { requestId?: unknown } = clone(request.method.input, request.message);
  copy.requestId = randomUUID();
  return { ...request, message: copy as typeof request.message };
}

/** Tries again while the server is unavailable: every unary call is safe to repeat. */
async function repeated<T>(attempt: () => Promise<T>, signal: AbortSignal): Promise<T> {
  for (let tries = 1; ; tries += 1) {
    try {
      return await attempt();
    } catch (thrown) {
      const error = asError(thrown);
      if (error.code !== Code.Unavailable || tries === ATTEMPTS) throw error;
      const ceiling = Math.min(2_000, 100 * 2 ** (tries - 1));
      const wait = Math.max(error.retryAfterMs ?? 0, ceiling * Math.random());
      await sleep(wait, undefined, { signal }).catch(() => { throw aborted(signal); });
    }
  }
}
