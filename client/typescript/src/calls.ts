/** What every call of the generated clients has: the token, a time limit, repeats, and typed errors. */
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

import { clone, create } from "@bufbuild/protobuf";
import type {
  DescMessage,
  DescMethodStreaming,
  DescMethodUnary,
  Message,
  MessageInitShape,
  MessageShape,
} from "@bufbuild/protobuf";
import { Code, ConnectError } from "@connectrpc/connect";
import type { ContextValues, StreamResponse, Transport, UnaryResponse } from "@connectrpc/connect";

import { Backoff } from "./backoff.js";
import type { Retry } from "./backoff.js";
import { raceSignal } from "./changes.js";
import { asError, MemstreamError } from "./errors.js";

export const ROUTING_KEY = "memstream-memory";
export const NAME = /^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$/;

/** A bearer token, or a function that gives the one of now; an empty one is not sent. */
export type Token = string | (() => string | Promise<string>);

type HeadersInit = ConstructorParameters<typeof Headers>[0];

interface CallSettings {
  readonly token: Token | undefined;
  readonly timeoutMs: number;
  readonly retry: Retry;
  /** Aborted with a ClosedError once the client is closed. */
  readonly closed: AbortSignal;
}

/** A transport over another one. A call rejects with a MemstreamError, or with the reason of the signal that ended it. */
export class CallTransport implements Transport {
  constructor(
    private readonly inner: Transport,
    private readonly settings: CallSettings,
  ) {}

  /** Repeats the call while the server is unavailable: every unary call reads, has a request_id, or is idempotent. */
  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: MessageInitShape<I>,
    contextValues?: ContextValues,
  ): Promise<UnaryResponse<I, O>> {
    const message = withRequestId(method.input, create(method.input, input));
    const headers = withRoute(new Headers(header), message);
    const limitMs = timeoutMs ?? this.settings.timeoutMs;
    const end = performance.now() + (limitMs > 0 ? limitMs : Infinity);
    const attempt = async (): Promise<UnaryResponse<I, O>> => {
      const authorized = await this.withToken(headers, signal);
      const leftMs = limitMs > 0 ? Math.max(1, Math.ceil(end - performance.now())) : limitMs;
      return this.inner.unary(method, signal, leftMs, authorized, message, contextValues);
    };
    const backoff = new Backoff(this.settings.retry);
    let giveUp: number | undefined;
    for (;;) {
      this.settings.closed.throwIfAborted();
      try {
        return await attempt();
      } catch (thrown) {
        const error = this.failed(thrown, signal);
        if (error.code !== Code.Unavailable && error.code !== Code.Canceled) throw error;
        giveUp ??= Math.min(end, performance.now() + this.settings.retry.callsMs);
        const waitMs = backoff.waitMs(error);
        if (performance.now() + waitMs >= giveUp) throw error;
        await this.pause(waitMs, signal);
      }
    }
  }

  /** Opens a stream once: the streams of this package, which number and count what they carry, open it again. */
  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodStreaming<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: AsyncIterable<MessageInitShape<I>>,
    contextValues?: ContextValues,
  ): Promise<StreamResponse<I, O>> {
    this.settings.closed.throwIfAborted();
    const typed = (thrown: unknown): never => { throw this.failed(thrown, signal); };
    const headers = await this.withToken(new Headers(header), signal).catch(typed);
    const response = await this.inner.stream(method, signal, timeoutMs, headers, input, contextValues).catch(typed);
    const messages = (): AsyncIterator<MessageShape<O>> => {
      const inner = response.message[Symbol.asyncIterator]();
      return { next: () => inner.next().catch(typed) };
    };
    return { ...response, message: { [Symbol.asyncIterator]: messages } };
  }

  /** The headers with the token of now. */
  private async withToken(headers: Headers, signal: AbortSignal | undefined): Promise<Headers> {
    const { token } = this.settings;
    if (token === undefined) return headers;
    let given: string;
    try {
      given = typeof token === "string" ? token : await raceSignal(token(), signal);
    } catch (thrown) {
      signal?.throwIfAborted();
      if (thrown instanceof ConnectError) throw asError(thrown);
      throw new MemstreamError(`there is no token: ${String(thrown)}`, Code.Unauthenticated, {}, thrown);
    }
    const authorized = new Headers(headers);
    if (given !== "") authorized.set("authorization", `Bearer ${given}`);
    return authorized;
  }

  /** What a call failed with. Throws the reason of the signal that ended it. */
  private failed(thrown: unknown, signal: AbortSignal | undefined): MemstreamError {
    signal?.throwIfAborted();
    this.settings.closed.throwIfAborted();
    return asError(thrown);
  }

  private async pause(waitMs: number, signal: AbortSignal | undefined): Promise<void> {
    const ends = AbortSignal.any(signal ? [signal, this.settings.closed] : [this.settings.closed]);
    await sleep(waitMs, undefined, { signal: ends }).catch(() => { ends.throwIfAborted(); });
  }
}

/** The memory that a request names, for consistent-hash routing. */
function withRoute(headers: Headers, message: Message): Headers {
  const named: Readonly<Record<string, unknown>> = { ...message };
  const { namespace, memory } = named;
  if (typeof namespace === "string" && typeof memory === "string" && NAME.test(namespace) && NAME.test(memory)) {
    if (!headers.has(ROUTING_KEY)) headers.set(ROUTING_KEY, `${namespace}/${memory}`);
  }
  return headers;
}

/** A request that can have a request_id and has none gets a fresh one, so that repeats of the call are harmless. */
function withRequestId<I extends DescMessage>(schema: I, message: MessageShape<I>): MessageShape<I> {
  if ((message as Message & { requestId?: unknown }).requestId !== "") return message;
  const copy: Message & { requestId?: unknown } = clone(schema, message);
  copy.requestId = randomUUID();
  return copy as MessageShape<I>;
}
