/**
 * The connections of a client: one transport over as many HTTP/2 connections as its calls need. A server takes a limited
 * number of calls and streams on a connection, and HTTP/2 holds back what exceeds it, without an error, until the timeout.
 */
import type { DescMessage, DescMethodStreaming, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import type { ContextValues, StreamResponse, Transport, UnaryResponse } from "@connectrpc/connect";

type HeadersInit = ConstructorParameters<typeof Headers>[0];

/** Calls on a connection unless the server allows fewer: HTTP/2 recommends that every hop allows at least 100. */
const CALLS_MAX = 96;

/** A connection with its transport. No type of Node.js: the declarations compile without @types/node. */
export interface Connection {
  readonly sessions: { abort(): void };
  readonly transport: Transport;
  calls: number;
}

/** A call goes to the first connection that has room; one without calls ends if another has room. */
export class Connections implements Transport {
  /** The open connections; read by the tests. */
  readonly open: Connection[];
  private room = CALLS_MAX;

  constructor(private readonly make: () => Connection) {
    this.open = [make()];
  }

  /** The server allows this many calls on a connection; 0: it does not say. */
  allowCalls(limit: number): void {
    if (limit > 0) this.room = Math.max(1, Math.min(CALLS_MAX, limit - Math.floor(limit / 8)));
  }

  /** Ends all connections and their calls. */
  abort(): void {
    for (const { sessions } of this.open) sessions.abort();
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    signal: AbortSignal | undefined,
    timeoutMs: number | undefined,
    header: HeadersInit | undefined,
    input: MessageInitShape<I>,
    contextValues?: ContextValues,
  ): Promise<UnaryResponse<I, O>> {
    const connection = this.take();
    try {
      return await connection.transport.unary(method, signal, timeoutMs, header, input, contextValues);
    } finally {
      this.release(connection);
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
    const connection = this.take();
    let held = true;
    const end = (): void => {
      if (held) this.release(connection);
      held = false;
    };
    signal?.addEventListener("abort", end, { once: true });
    try {
      const response = await connection.transport.stream(method, signal, timeoutMs, header, input, contextValues);
      const messages = (): AsyncIterator<MessageShape<O>> => {
        const inner = response.message[Symbol.asyncIterator]();
        const next = async (): Promise<IteratorResult<MessageShape<O>>> => {
          try {
            const result = await inner.next();
            if (result.done) end();
            return result;
          } catch (thrown) {
            end();
            throw thrown;
          }
        };
        return { next };
      };
      return { ...response, message: { [Symbol.asyncIterator]: messages } };
    } catch (thrown) {
      end();
      throw thrown;
    }
  }

  private take(): Connection {
    let connection = this.open.find(({ calls }) => calls < this.room);
    if (!connection) {
      connection = this.make();
      this.open.push(connection);
    }
    connection.calls += 1;
    return connection;
  }

  private release(connection: Connection): void {
    connection.calls -= 1;
    if (connection.calls > 0) return;
    if (!this.open.some((other) => other !== connection && 2 * other.calls <= this.room)) return;
    this.open.splice(this.open.indexOf(connection), 1);
    connection.sessions.abort();
  }
}
