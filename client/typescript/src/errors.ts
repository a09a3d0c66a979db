/** What every call of this package fails with. */
import type { Any } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";

import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { BadRequest, ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details_pb.js";
import type { Status } from "./gen/google/rpc/status_pb.js";
import { ErrorReason } from "./gen/memstream/v1/error_pb.js";
import type { GoingAway } from "./gen/memstream/v1/stream_service_pb.js";

const DOMAIN = "memstream.dev";

/** Which field is wrong, and how. */
export interface Violation {
  readonly field: string;
  readonly description: string;
}

/** What a status says beside its code and message. */
interface Details {
  readonly reason?: ErrorReason;
  readonly details?: Readonly<Record<string, string>>;
  readonly violations?: readonly Violation[];
  readonly retryAfterMs?: number | undefined;
}

/**
 * A call failed. `code` is the gRPC status; `reason` says why, and what to do (see error.proto), and is UNSPECIFIED
 * when the status came from a proxy, the transport or this package; `details` belong to the reason; `retryAfterMs` is
 * the time to wait before a retry, where the server says one.
 */
export class MemstreamError extends ConnectError {
  readonly reason: ErrorReason;
  readonly reasonDetails: Readonly<Record<string, string>>;
  readonly violations: readonly Violation[];
  readonly retryAfterMs: number | undefined;

  constructor(message: string, code: Code, said: Details = {}, cause?: unknown) {
    super(message, code, undefined, undefined, cause);
    this.reason = said.reason ?? ErrorReason.UNSPECIFIED;
    this.reasonDetails = said.details ?? {};
    this.violations = said.violations ?? [];
    this.retryAfterMs = said.retryAfterMs;
  }

  // ConnectError takes everything that looks like one of its own for one, and so would this class.
  static override [Symbol.hasInstance](value: unknown): boolean {
    return Function.prototype[Symbol.hasInstance].call(this, value);
  }

  /** The reason's name, for instance "MEMORY_NOT_FOUND"; empty where there is none. */
  get reasonName(): string {
    return this.reason === ErrorReason.UNSPECIFIED ? "" : ErrorReason[this.reason];
  }

  /** Whether the same call may succeed later. */
  get transient(): boolean {
    if (this.code === Code.ResourceExhausted) return this.reason !== ErrorReason.WINDOW_EXCEEDED;
    return this.code === Code.Unavailable || this.code === Code.DeadlineExceeded;
  }
}

/**
 * The server expects a lower number than it had acknowledged, and what lies between is no longer held here: it was
 * restored from an older backup, or the memory was made anew. A new stream goes on from `expectedSequence`; what was
 * numbered from there on is the caller's to send again.
 */
export class ServerBehindError extends MemstreamError {
  constructor(
    readonly expectedSequence: bigint,
    readonly acknowledged: bigint,
  ) {
    super(
      `the server expects observation ${expectedSequence.toString()} although it had acknowledged ` +
        `${acknowledged.toString()}: it was restored from an older backup, or the memory was made anew; open a new ` +
        "stream and send again what it lacks",
      Code.DataLoss,
    );
  }
}

/** The stream or the client was used after it was closed or abandoned. */
export class ClosedError extends MemstreamError {
  constructor() {
    super("it is closed", Code.Canceled);
  }
}

/**
 * The MemstreamError for whatever a generated client threw. It keeps the details of the status: `findDetails` gives each.
 */
export function asError(thrown: unknown): MemstreamError {
  if (thrown instanceof MemstreamError) return thrown;
  const error = ConnectError.from(thrown, Code.Unknown);
  // A connection that was reset is ABORTED here, or CANCELLED with a text of the transport's; what the server aborts
  // has a reason, and what the caller gave up another text.
  const lost = error.code === Code.Canceled && error.rawMessage.startsWith("http/2 stream closed");
  // One that was reset inside of a message is INVALID_ARGUMENT, as if a request were wrong.
  const torn = error.code === Code.InvalidArgument && error.rawMessage.startsWith("protocol error:");
  const reset = error.code === Code.Aborted || lost || torn;
  const found = typed(error, error.code, thrown);
  return reset && found.reason === ErrorReason.UNSPECIFIED ? typed(error, Code.Unavailable, thrown) : found;
}

/** The error for a status inside of a message. */
export function fromStatus(status: Status | undefined): MemstreamError {
  const error = new ConnectError(status?.message ?? "", codeOf(status?.code));
  error.details = (status?.details ?? []).map(incoming);
  return typed(error, error.code);
}

/** A detail as one comes with the status of a call. */
function incoming(detail: Any): ConnectError["details"][number] {
  return { type: detail.typeUrl.slice(detail.typeUrl.lastIndexOf("/") + 1), value: detail.value };
}

function typed(error: ConnectError, code: Code, cause?: unknown): MemstreamError {
  const said = detailsOf(
    error.findDetails(ErrorInfoSchema)[0],
    error.findDetails(BadRequestSchema)[0],
    error.findDetails(RetryInfoSchema)[0],
  );
  const found = new MemstreamError(error.rawMessage, code, said, cause);
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

export function invalid(field: string, description: string): MemstreamError {
  return new MemstreamError(`${field} ${description}`, Code.InvalidArgument, {
    reason: ErrorReason.INVALID_FIELD,
    violations: [{ field, description }],
  });
}

/** What a wait rejects with that took longer than its caller would wait. */
export function late(timeoutMs: number): MemstreamError {
  return new MemstreamError(`there was no answer within ${timeoutMs} ms`, Code.DeadlineExceeded);
}

export function unavailable(message: string): MemstreamError {
  return new MemstreamError(message, Code.Unavailable);
}

export function shuttingDown(going?: GoingAway): MemstreamError {
  const said = going?.description ?? "";
  return new MemstreamError(said || "the server is going away", Code.Unavailable, {
    reason: ErrorReason.SHUTTING_DOWN,
  });
}

export function protocolViolation(message: string): MemstreamError {
  return new MemstreamError(message, Code.FailedPrecondition, { reason: ErrorReason.PROTOCOL_VIOLATION });
}

/** What a stream fails with whose server answered `open` with something else. */
export function notOpened(answer: string | undefined): MemstreamError {
  return protocolViolation(`the server answered open with ${answer ?? "nothing"}`);
}

/**
 * Whether a stream that ended so is to be opened again: transport failures, what the server says will pass, and
 * disagreements about numbers and credits, which every `opened` settles anew.
 */
export function isCut(error: MemstreamError): boolean {
  if (error instanceof ServerBehindError || error instanceof ClosedError) return false;
  if (error.reason === ErrorReason.SEQUENCE_GAP || error.reason === ErrorReason.WINDOW_EXCEEDED) return true;
  if (error.reason !== ErrorReason.UNSPECIFIED) return error.transient;
  // RST_STREAM is INTERNAL, CANCELLED or UNKNOWN, a proxy's own time limit DEADLINE_EXCEEDED.
  return [Code.Unavailable, Code.Internal, Code.Unknown, Code.Canceled, Code.DeadlineExceeded].includes(error.code);
}
