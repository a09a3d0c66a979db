/** The connection to a server: its settings and its generated clients. */
import { EventEmitter } from "node:events";
import type { SecureClientSessionOptions } from "node:http2";

import type { Duration } from "@bufbuild/protobuf/wkt";
import { createClient } from "@connectrpc/connect";
import type { Client, Transport } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { RETRY } from "./backoff.js";
import type { Retry } from "./backoff.js";
import { CallTransport, NAME, ROUTING_KEY } from "./calls.js";
import type { Token } from "./calls.js";
import { Connections } from "./connections.js";
import { ClosedError, invalidField } from "./errors.js";
import { BlockService } from "./gen/memstream/v1/block_service_pb.js";
import { ContextService } from "./gen/memstream/v1/context_service_pb.js";
import { ConversationService } from "./gen/memstream/v1/conversation_service_pb.js";
import { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import { StreamService } from "./gen/memstream/v1/stream_service_pb.js";

/** Bytes that a server accepts in one message by default. */
export const WRITE_BYTES_MAX = 16 << 20;
/** How long the answer of a ping may take; the tests shorten it. */
export const pings = { timeoutMs: 20_000 };

/** PEM text or bytes; an array for several. */
export type Pem = string | Uint8Array | readonly (string | Uint8Array)[];

/** How to encrypt the connection; `cert` and `key` make TLS mutual. */
export interface Tls {
  /** Certificates of the trusted authorities. Default: the system's. */
  readonly ca?: Pem;
  readonly cert?: Pem;
  readonly key?: string | Uint8Array;
  /** The name in the server's certificate, if it is not the target's. */
  readonly servername?: string;
}

/** A transport that makes spans: it sees the messages of a stream, and not who sends them. */
export interface TransportOfCallers extends Transport {
  /** The running code asks this query, a message of a stream. */
  noteCaller(query: object): void;
}

/** How to connect. */
export interface Settings {
  /**
   * Sent as a bearer token with every call. The client calls a function for each call, each retry and each opening of a
   * stream, so the function should cache the token until shortly before it expires. If the server ends a stream because
   * its token has expired, the client opens the stream again with a new token. An error of the function fails the call: a
   * ConnectError or MemstreamError keeps its code, so that UNAVAILABLE is retried; any other error becomes
   * UNAUTHENTICATED, with the error as `cause`.
   */
  readonly token?: Token;
  /** Encrypts the connection; `true` uses the system's roots. Default plain text. */
  readonly tls?: boolean | Tls;
  /** Limits each unary call and query that has no timeout of its own. Default 30 s. */
  readonly timeoutMs?: number;
  /** How long calls are retried and streams try to reconnect. */
  readonly retry?: Partial<Retry>;
  /** Idle time after which the client pings the server. Default 60 s. */
  readonly keepaliveMs?: number;
  /**
   * Limit in bytes of one sent message; a larger one fails with RESOURCE_EXHAUSTED. Default 16 MiB, the server's default:
   * a server does not read a message over its own limit to the end, and the transport would wait for that until the
   * timeout.
   */
  readonly writeBytesMax?: number;
  /** Wraps the transport of all calls, once around all attempts: `tracing()` of "@memstream/client/otel" makes spans. */
  readonly tracing?: (transport: Transport) => Transport;
}

/** The namespace and name of a memory or a conversation. */
export interface MemoryPath {
  readonly namespace: string;
  readonly name: string;
}

/** Parses "namespace/name"; checked here because the routing header cannot carry other characters. */
export function memoryPath(path: string, field = "memory"): MemoryPath {
  const slash = path.indexOf("/");
  if (slash < 0) throw invalidField(field, `"${path}" has no "/": write "namespace/name"`);
  const namespace = path.slice(0, slash);
  const name = path.slice(slash + 1);
  for (const [part, text] of Object.entries({ namespace, name })) {
    if (NAME.test(text)) continue;
    const allowed = "1 to 128 letters, digits, \"-\", \"_\", \".\" and \"~\", and begin with a letter or a digit";
    throw invalidField(field, `the ${part} of "${path}" must have ${allowed}`);
  }
  return { namespace, name };
}

/** Milliseconds of a duration; 0 if there is none. */
export function durationMs(duration: Duration | undefined): number {
  return duration ? Number(duration.seconds) * 1e3 + duration.nanos / 1e6 : 0;
}

const ADDRESS = /^(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/?#@[\]\\]+)(?::([0-9]{1,5}))?$/;

/** The connections to a server and their generated clients. */
export class Link {
  readonly streams: Client<typeof StreamService>;
  readonly memories: Client<typeof MemoryService>;
  readonly blocks: Client<typeof BlockService>;
  readonly contexts: Client<typeof ContextService>;
  readonly conversations: Client<typeof ConversationService>;
  readonly operations: Client<typeof OperationService>;
  readonly server: Client<typeof ServerService>;
  readonly timeoutMs: number;
  readonly retry: Retry;
  /** Aborted with a ClosedError when the client is closed. */
  readonly closed: AbortSignal;
  /** See TransportOfCallers; without spans it does nothing. */
  readonly noteCaller: (query: object) => void;

  /** The connections; the tests read them. */
  readonly connections: Connections;
  private readonly endController = new AbortController();

  constructor(target: string, settings: Settings) {
    if (target === "") throw invalidField("target", "is empty: name the server, as in 127.0.0.1:7700");
    if (/^https?:\/\//.test(target)) {
      throw invalidField("target", `"${target}" is a URL: write host:port of the gRPC port`);
    }
    const found = ADDRESS.exec(target);
    const port = Number(found?.[1] ?? 1);
    if (!found || port < 1 || port > 65_535) {
      throw invalidField("target", `"${target}" is no address: write host:port, as in 127.0.0.1:7700`);
    }
    this.timeoutMs = settings.timeoutMs ?? 30_000;
    this.retry = { ...RETRY, ...settings.retry };
    this.closed = this.endController.signal;
    const tls = settings.tls === true ? {} : settings.tls;
    const baseUrl = `${tls ? "https" : "http"}://${target}`;
    this.connections = new Connections(() => {
      const sessions = new Http2SessionManager(
        baseUrl,
        { pingIntervalMs: settings.keepaliveMs ?? 60_000, pingTimeoutMs: pings.timeoutMs },
        tls ? tlsOptions(tls) : {},
      );
      const transport = createGrpcTransport({
        baseUrl,
        sessionManager: sessions,
        readMaxBytes: 64 << 20,
        writeMaxBytes: settings.writeBytesMax ?? WRITE_BYTES_MAX,
      });
      return { sessions: { abort: () => { abortSessions(sessions); } }, transport, calls: 0 };
    });
    const { timeoutMs, retry, closed } = this;
    const calls = new CallTransport(this.connections, { token: settings.token, timeoutMs, retry, closed });
    const transport = settings.tracing?.(calls) ?? calls;
    this.noteCaller = (query) => { (transport as Partial<TransportOfCallers>).noteCaller?.(query); };
    this.streams = createClient(StreamService, transport);
    this.memories = createClient(MemoryService, transport);
    this.blocks = createClient(BlockService, transport);
    this.contexts = createClient(ContextService, transport);
    this.conversations = createClient(ConversationService, transport);
    this.operations = createClient(OperationService, transport);
    this.server = createClient(ServerService, transport);
  }

  /** The header that names a stream's memory, for consistent-hash routing. */
  route(memory: MemoryPath): Record<string, string> {
    return { [ROUTING_KEY]: `${memory.namespace}/${memory.name}` };
  }

  /** Ends the connection and all its calls and streams, which reject with a ClosedError. */
  close(): void {
    this.endController.abort(new ClosedError());
    this.connections.abort();
  }
}

/**
 * Ends a connection. A session that a missing ping has destroyed emits its error a moment later; the manager's listeners
 * are gone by then, and an error without a listener would end the process.
 */
function abortSessions(sessions: Http2SessionManager): void {
  const { conn } = (sessions as unknown as { s?: { conn?: unknown } }).s ?? {};
  if (conn instanceof EventEmitter) conn.once("error", () => undefined);
  sessions.abort();
}

function tlsOptions({ ca, cert, key, servername }: Tls): SecureClientSessionOptions {
  const bytes = (pem: string | Uint8Array): string | Buffer => (typeof pem === "string" ? pem : Buffer.from(pem));
  const all = (pem: Pem): (string | Buffer)[] => (
    typeof pem === "string" || pem instanceof Uint8Array ? [bytes(pem)] : pem.map(bytes)
  );
  return {
    ...(ca !== undefined && { ca: all(ca) }),
    ...(cert !== undefined && { cert: all(cert) }),
    ...(key !== undefined && { key: bytes(key) }),
    ...(servername !== undefined && { servername }),
  };
}
