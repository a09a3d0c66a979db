/** The errors of this package. */
import { getOption, hasOption } from "@bufbuild/protobuf";
import type { Any } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { BadRequest, ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import { ErrorReason, ErrorReasonSchema, rule } from "./gen/memstream/v1/error_pb.js";
import type { GoingAway } from "./gen/memstream/v1/stream_service_pb.js";

const DOMAIN = "memstream.dev";

/** An invalid field, and why it is invalid. */
export interface Violation {
  readonly field: string;
  readonly description: string;
}

/** The details of a status. */
interface Details {
  readonly reason?: ErrorReason;
  readonly details?: Readonly<Record<string, string>>;
  readonly violations?: readonly Violation[];
  readonly retryAfterMs?: number | undefined;
}

/**
 * A failed call. `code` is the gRPC status code. `reason` is the cause; error.proto says what to do about each. It is
 * UNSPECIFIED if the status came from a proxy, the transport or this package. `reasonDetails` belong to the reason.
 * `retryAfterMs` is the time to wait before a retry, if the server gives one.
 */
export class MemstreamError extends ConnectError {
  readonly reason: ErrorReason;
  readonly reasonDetails: Readonly<Record<string, string>>;
  readonly violations: readonly Violation[];
  readonly retryAfterMs: number | undefined;

  constructor(message: string, code: Code, details: Details = {}, cause?: unknown) {
    super(message, code, undefined, undefined, cause);
    this.reason = details.reason ?? ErrorReason.UNSPECIFIED;
    this.reasonDetails = details.details ?? {};
    this.violations = details.violations ?? [];
    this.retryAfterMs = details.retryAfterMs;
  }

  // ConnectError accepts any object with its shape as an instance; this class must not inherit that.
  static override [Symbol.hasInstance](value: unknown): boolean {
    return Function.prototype[Symbol.hasInstance].call(this, value);
  }

  /** The reason's name, for instance "MEMORY_NOT_FOUND"; empty if there is none. */
  get reasonName(): string {
    return this.reason === ErrorReason.UNSPECIFIED ? "" : ErrorReason[this.reason];
  }

  /** For logs: the reason, or else the gRPC status, and the message. */
  override toString(): string {
    return this.reasonName ? `MemstreamError: ${this.reasonName}: ${this.rawMessage}` : `MemstreamError: ${this.message}`;
  }

  /** Whether the same call may succeed later. */
  get transient(): boolean {
    const value = ErrorReasonSchema.value[this.reason];
    if (hasOption(value, rule)) return getOption(value, rule).transient;
    return [Code.Unavailable, Code.DeadlineExceeded, Code.ResourceExhausted].includes(this.code);
  }
}

/**
 * The server expects a lower number than it had acknowledged, and the stream no longer buffers the observations between:
 * the server was restored from an older backup, or the memory was recreated. A new stream continues at
 * `expectedSequence`; the caller must resend the observations from that number on.
 */
export class ServerBehindError extends MemstreamError {
  constructor(
    readonly expectedSequence: bigint,
    readonly acknowledged: bigint,
  ) {
    super(
      `the server expects observation ${expectedSequence.toString()} although it had acknowledged ` +
        `${acknowledged.toString()}: it was restored from an older backup, or the memory was recreated. Open a new ` +
        `stream of this producer and send the observations from ${expectedSequence.toString()} on again`,
      Code.DataLoss,
    );
  }
}

/** The stream or the client was used after it was closed or abandoned. */
export class ClosedError extends MemstreamError {
  constructor() {
    super("the stream or client is closed", Code.Canceled);
  }
}

/**
 * Returns the MemstreamError for an error of a generated client. It keeps the details of the status, for `findDetails`.
 */
export function asError(thrown: unknown): MemstreamError {
  if (thrown instanceof MemstreamError) return thrown;
  const error = ConnectError.from(thrown, Code.Unknown);
  // The transport reports a reset connection as ABORTED, or as CANCELLED with this text. ABORTED of the server has a
  // reason, and a call that the caller cancelled has another text.
  const lost = error.code === Code.Canceled && error.rawMessage.startsWith("http/2 stream closed");
  // A reset inside of a message is INVALID_ARGUMENT, as if the request were invalid.
  const torn = error.code === Code.InvalidArgument && error.rawMessage.startsWith("protocol error:");
  const reset = error.code === Code.Aborted || lost || torn;
  const found = toMemstreamError(error, error.code, thrown);
  return reset && found.reason === ErrorReason.UNSPECIFIED ? toMemstreamError(error, Code.Unavailable, thrown) : found;
}

/** Returns the error for a status inside of a message. */
export function fromStatus(status: Status | undefined): MemstreamError {
  const error = new ConnectError(status?.message ?? "", codeOf(status?.code));
  error.details = (status?.details ?? []).map(toIncomingDetail);
  return toMemstreamError(error, error.code);
}

/** Converts a detail to the form that ConnectError has for the status of a call. */
function toIncomingDetail(detail: Any): ConnectError["details"][number] {
  return { type: detail.typeUrl.slice(detail.typeUrl.lastIndexOf("/") + 1), value: detail.value };
}

function toMemstreamError(error: ConnectError, code: Code, cause?: unknown): MemstreamError {
  const details = detailsOf(
    error.findDetails(ErrorInfoSchema)[0],
    error.findDetails(BadRequestSchema)[0],
    error.findDetails(RetryInfoSchema)[0],
  );
  const found = new MemstreamError(error.rawMessage, code, details, cause);
  found.details = error.details;
  error.metadata.forEach((value, key) => { found.metadata.append(key, value); });
  return found;
}

function detailsOf(info: ErrorInfo | undefined, bad: BadRequest | undefined, retry: RetryInfo | undefined): Details {
  const own = info?.domain === DOMAIN ? info : undefined;
  const delay = retry?.retryDelay;
  return {
    ...(own && { reason: reasonOf(own.reason), details: own.metadata }),
    violations: bad?.fieldViolations ?? [],
    retryAfterMs: delay && Number(delay.seconds) * 1e3 + delay.nanos / 1e6,
  };
}

function codeOf(value: number | undefined): Code {
  return Object.values(Code).find((code): code is Code => code === value) ?? Code.Unknown;
}

function reasonOf(name: string): ErrorReason {
  return name in ErrorReason ? ErrorReason[name as keyof typeof ErrorReason] : ErrorReason.UNSPECIFIED;
}

export function invalidField(field: string, description: string): MemstreamError {
  return new MemstreamError(`${field}: ${description}`, Code.InvalidArgument, {
    reason: ErrorReason.INVALID_FIELD,
    violations: [{ field, description }],
  });
}

/** Returns the error of a wait that exceeded its timeout. */
export function deadlineError(timeoutMs: number): MemstreamError {
  return new MemstreamError(`no answer within ${timeoutMs} ms`, Code.DeadlineExceeded);
}

export function unavailableError(message: string): MemstreamError {
  return new MemstreamError(message, Code.Unavailable);
}

export function shuttingDownError(going?: GoingAway): MemstreamError {
  const message = going?.description ?? "";
  return new MemstreamError(message || "the server is going away", Code.Unavailable, {
    reason: ErrorReason.SHUTTING_DOWN,
  });
}

export function protocolViolationError(message: string): MemstreamError {
  return new MemstreamError(message, Code.FailedPrecondition, { reason: ErrorReason.PROTOCOL_VIOLATION });
}

/** Returns the error of a stream on which the server answered `open` with another message. */
export function notOpenedError(answer: string | undefined): MemstreamError {
  return protocolViolationError(`the server answered open with ${answer ?? "nothing"}`);
}

/**
 * Whether to reopen a stream after `error`: transport failures, transient errors, and errors about numbers and flow
 * control, which the next `opened` resolves.
 */
export function isCut(error: MemstreamError): boolean {
  if (error instanceof ServerBehindError || error instanceof ClosedError) return false;
  if (error.reason === ErrorReason.SEQUENCE_GAP || error.reason === ErrorReason.WINDOW_EXCEEDED) return true;
  if (error.reason !== ErrorReason.UNSPECIFIED) return error.transient;
  // RST_STREAM is INTERNAL, CANCELLED or UNKNOWN; a proxy's timeout is DEADLINE_EXCEEDED.
  return [Code.Unavailable, Code.Internal, Code.Unknown, Code.Canceled, Code.DeadlineExceeded].includes(error.code);
}
