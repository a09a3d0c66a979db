/** Adds to every call of the generated clients: the token, a timeout, retries, and typed errors. */
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

/** A bearer token, or a function that returns the current one; an empty token is not sent. */
export type Token = string | (() => string | Promise<string>);

type HeadersInit = ConstructorParameters<typeof Headers>[0];

interface CallSettings {
  readonly token: Token | undefined;
  readonly timeoutMs: number;
  readonly retry: Retry;
  /** Aborted with a ClosedError when the client is closed. */
  readonly closed: AbortSignal;
}

/** Wraps a transport. A call rejects with a MemstreamError, or with the reason of the signal that aborted it. */
export class CallTransport implements Transport {
  constructor(
    private readonly inner: Transport,
    private readonly settings: CallSettings,
  ) {}

  /** Retries the call while the server is unavailable: every unary call reads, has a request_id, or is idempotent. */
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
    let giveUpAt: number | undefined;
    for (;;) {
      this.settings.closed.throwIfAborted();
      try {
        return await attempt();
      } catch (thrown) {
        const error = this.toError(thrown, signal);
        if (error.code !== Code.Unavailable && error.code !== Code.Canceled) throw error;
        giveUpAt ??= Math.min(end, performance.now() + this.settings.retry.callsMs);
        const delayMs = backoff.nextDelayMs(error);
        if (performance.now() + delayMs >= giveUpAt) throw error;
        await this.waitForRetry(delayMs, signal);
      }
    }
  }

  /** Opens a stream without retries: the streams of this package reconnect and resend their own messages. */
  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodStreaming<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: AsyncIterable<MessageInitShape<I>>,
    contextValues?: ContextValues,
  ): Promise<StreamResponse<I, O>> {
    this.settings.closed.throwIfAborted();
    const rethrow = (thrown: unknown): never => { throw this.toError(thrown, signal); };
    const headers = await this.withToken(new Headers(header), signal).catch(rethrow);
    const response = await this.inner.stream(method, signal, timeoutMs, headers, input, contextValues).catch(rethrow);
    const messages = (): AsyncIterator<MessageShape<O>> => {
      const inner = response.message[Symbol.asyncIterator]();
      return { next: () => inner.next().catch(rethrow) };
    };
    return { ...response, message: { [Symbol.asyncIterator]: messages } };
  }

  /** Adds the current token to a copy of the headers. */
  private async withToken(headers: Headers, signal: AbortSignal | undefined): Promise<Headers> {
    const { token } = this.settings;
    if (token === undefined) return headers;
    let given: string;
    try {
      given = typeof token === "string" ? token : await raceSignal(token(), signal);
    } catch (thrown) {
      signal?.throwIfAborted();
      if (thrown instanceof ConnectError) throw asError(thrown);
      throw new MemstreamError(`cannot get a token: ${String(thrown)}`, Code.Unauthenticated, {}, thrown);
    }
    const authorized = new Headers(headers);
    if (given !== "") authorized.set("authorization", `Bearer ${given}`);
    return authorized;
  }

  /** Returns the error of a failed call. Throws the reason of the signal that aborted it. */
  private toError(thrown: unknown, signal: AbortSignal | undefined): MemstreamError {
    signal?.throwIfAborted();
    this.settings.closed.throwIfAborted();
    return asError(thrown);
  }

  private async waitForRetry(delayMs: number, signal: AbortSignal | undefined): Promise<void> {
    const ends = AbortSignal.any(signal ? [signal, this.settings.closed] : [this.settings.closed]);
    await sleep(delayMs, undefined, { signal: ends }).catch(() => { ends.throwIfAborted(); });
  }
}

/** Adds the routing header with the memory that a request names, for consistent-hash routing. */
function withRoute(headers: Headers, message: Message): Headers {
  const named: Readonly<Record<string, unknown>> = { ...message };
  const { namespace, memory } = named;
  if (typeof namespace === "string" && typeof memory === "string" && NAME.test(namespace) && NAME.test(memory)) {
    if (!headers.has(ROUTING_KEY)) headers.set(ROUTING_KEY, `${namespace}/${memory}`);
  }
  return headers;
}

/** Sets a new request_id if the request has the field and it is empty, so that retries of the call are idempotent. */
function withRequestId<I extends DescMessage>(schema: I, message: MessageShape<I>): MessageShape<I> {
  if ((message as Message & { requestId?: unknown }).requestId !== "") return message;
  const copy: Message & { requestId?: unknown } = clone(schema, message);
  copy.requestId = randomUUID();
  return copy as MessageShape<I>;
}
