/** The connection: how it is configured, what every call sends, and errors turned into one kind. */
import type { SecureClientSessionOptions } from "node:http2";

import type { Duration } from "@bufbuild/protobuf/wkt";
import { createClient } from "@connectrpc/connect";
import type { Client } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { RETRY } from "./backoff.js";
import type { Retry } from "./backoff.js";
import { CallTransport, NAME, ROUTING_KEY } from "./calls.js";
import type { Token } from "./calls.js";
import { ClosedError, invalid } from "./errors.js";
import { ConversationService } from "./gen/memstream/v1/conversation_service_pb.js";
import { MemoryService } from "./gen/memstream/v1/memory_service_pb.js";
import { OperationService } from "./gen/memstream/v1/operation_service_pb.js";
import { ServerService } from "./gen/memstream/v1/server_service_pb.js";
import { StreamService } from "./gen/memstream/v1/stream_service_pb.js";

/** What a server takes in one message, unless it is set otherwise. */
export const WRITE_BYTES_MAX = 16 << 20;

/** PEM text or bytes; several as an array. */
export type Pem = string | Uint8Array | readonly (string | Uint8Array)[];

/** How to encrypt; `cert` and `key` make it mutual. */
export interface Tls {
  /** Certificates of the authorities that are trusted. Default: the system's. */
  readonly ca?: Pem;
  readonly cert?: Pem;
  readonly key?: string | Uint8Array;
  /** The name that the server's certificate is for, where it is not the target's. */
  readonly servername?: string;
}

/** How to connect. */
export interface Settings {
  /**
   * Sent as a bearer token with every call. A function is asked for it before every call, every repeat of one and every
   * opening of a stream, so it should keep the token until shortly before it expires; a stream that the server ends
   * because its token is no longer good is opened again. What it throws fails the call: a ConnectError or MemstreamError
   * keeps its code, so that UNAVAILABLE is tried again, anything else is UNAUTHENTICATED with it as `cause`.
   */
  readonly token?: Token;
  /** Encrypts. `true` takes the system's roots. Default plain text. */
  readonly tls?: boolean | Tls;
  /** Bounds every unary call and query that has no limit of its own. Default 30 s. */
  readonly timeoutMs?: number;
  /** How long calls are repeated and streams try to reconnect. */
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
  /** Aborted with a ClosedError once the client is closed. */
  readonly closed: AbortSignal;

  private readonly sessions: Http2SessionManager;
  private readonly end = new AbortController();

  constructor(target: string, settings: Settings) {
    this.timeoutMs = settings.timeoutMs ?? 30_000;
    this.retry = { ...RETRY, ...settings.retry };
    this.closed = this.end.signal;
    const tls = settings.tls === true ? {} : settings.tls;
    const baseUrl = `${tls ? "https" : "http"}://${target}`;
    this.sessions = new Http2SessionManager(
      baseUrl,
      { pingIntervalMs: settings.keepaliveMs ?? 60_000, pingTimeoutMs: 20_000 },
      tls ? tlsOptions(tls) : {},
    );
    const inner = createGrpcTransport({
      baseUrl,
      sessionManager: this.sessions,
      readMaxBytes: 64 << 20,
      writeMaxBytes: settings.writeBytesMax ?? WRITE_BYTES_MAX,
    });
    const { timeoutMs, retry, closed } = this;
    const transport = new CallTransport(inner, { token: settings.token, timeoutMs, retry, closed });
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

  /** Ends the connection and every call and stream on it, which reject with a ClosedError. */
  close(): void {
    this.end.abort(new ClosedError());
    this.sessions.abort();
  }
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
