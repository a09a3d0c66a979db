// The contract over Connect: unary calls as JSON, streams of the server as JSON in envelopes.

// Where the server's paths begin: this file is at console/api.js below it, also behind a proxy that adds a prefix.
const ROOT = new URL("../", import.meta.url);

// A reload keeps the key for its tab, if no other page of this origin can read it and nobody on the way: over HTTPS or
// from this machine, and without a prefix, below which a proxy may have other pages.
const SLOT = "memstream key";
export const keepsKey = isSecureContext && ROOT.pathname === "/";
let key = readKept();

function readKept() {
  try {
    return (keepsKey && sessionStorage.getItem(SLOT)) || "";
  } catch {
    return ""; // the browser denies storage
  }
}

/** Uses a key; `keep`: a reload of the tab keeps it, where that is safe. */
export function setKey(value, keep = false) {
  key = value;
  try {
    if (value && keep && keepsKey) sessionStorage.setItem(SLOT, value);
    else sessionStorage.removeItem(SLOT);
  } catch {
    // the browser denies storage
  }
}

export const hasKey = () => key !== "";
export const apiRoot = () => ROOT.href;

// The calls of the present view, the last one of each method.
let recorded = new Map();

/** Forgets the calls of the view before. */
export function beginRecord() {
  recorded = new Map();
}

/** The calls that the view has made: { method, request }. */
export const recordedCalls = () => [...recorded.values()];

function record(method, request) {
  recorded.delete(method);
  recorded.set(method, { method, request });
}

let onRefused = () => undefined;

/** `run(error)` is called when a call is refused because its key is missing, or no longer valid. */
export function whenRefused(run) {
  onRefused = run;
}

/** An error of a call. `code` is Connect's; `info` has the bytes of google.rpc.ErrorInfo. */
export class CallError extends Error {
  constructor(code, message, info = "") {
    super(message);
    this.code = code;
    this.info = info;
  }

  /** The reason, field 1 of ErrorInfo; empty if there is none. */
  get reason() {
    return this.info.charCodeAt(0) === 0x0a ? this.info.slice(2, 2 + this.info.charCodeAt(1)) : "";
  }

  /** A value of ErrorInfo's metadata, in which a value follows its name as field 2; empty if there is none. */
  detail(name) {
    const at = this.info.indexOf(`${name}\x12`) + name.length + 1;
    return at > name.length ? this.info.slice(at + 1, at + 1 + this.info.charCodeAt(at)) : "";
  }

  /** Whether the same call may succeed later. */
  get transient() {
    return ["unavailable", "deadline_exceeded", "resource_exhausted", "aborted", "unknown"].includes(this.code);
  }
}

function headersOf(more) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

/** Whether the text can be the value of a header. */
export const isHeaderText = (text) => /^[\x21-\x7e]+$/.test(text);

/** Calls `Service/Method` and returns the answer. Throws CallError; an aborted `signal` throws AbortError. */
export async function call(method, request, signal) {
  record(method, request);
  const answer = await send(`memstream.v1.${method}`, {
    method: "POST",
    headers: headersOf({ "content-type": "application/json", "connect-protocol-version": "1" }),
    body: JSON.stringify(request),
    signal,
  });
  return readAnswer(answer);
}

/** What the caller is, and may do in a namespace; without a namespace, for the whole server. */
export async function askRights(namespace, signal) {
  const query = namespace ? `?namespace=${encodeURIComponent(namespace)}` : "";
  return readAnswer(await send(`console/rights${query}`, { headers: headersOf({}), signal }));
}

/** The JSON of an answer. The connection may be lost while it is read. */
async function readAnswer(answer) {
  if (!answer.ok) throw await errorOf(answer);
  try {
    return await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("unavailable", "The connection was lost.");
  }
}

async function send(path, options) {
  try {
    return await fetch(new URL(path, ROOT), { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("unavailable", "The server does not answer.");
  }
}

async function errorOf(answer) {
  try {
    return callError(await answer.json());
  } catch {
    // A proxy answers in a form of its own while the server behind it is away.
    const code = answer.status === 401 ? "unauthenticated" : answer.status >= 500 ? "unavailable" : "unknown";
    return noted(new CallError(code, `The server answered ${answer.status}.`));
  }
}

function callError(error) {
  return noted(new CallError(error.code ?? "unknown", error.message ?? "The call failed.", infoOf(error.details ?? [])));
}

function noted(error) {
  if (error.code === "unauthenticated") queueMicrotask(() => onRefused(error));
  return error;
}

function infoOf(details) {
  const info = details.find((detail) => detail.type === "google.rpc.ErrorInfo");
  return info ? atob(info.value.replaceAll("-", "+").replaceAll("_", "/")) : "";
}

const END = 0b10;
const FRAME_BYTES_MAX = 64 << 20;

/** Calls a method whose answers stream, and yields them. Throws CallError when the stream ends with an error. */
export async function* stream(method, request, signal) {
  record(method, request);
  const body = new TextEncoder().encode(JSON.stringify(request));
  const framed = new Uint8Array(5 + body.length);
  new DataView(framed.buffer).setUint32(1, body.length);
  framed.set(body, 5);
  const answer = await send(`memstream.v1.${method}`, {
    method: "POST",
    headers: headersOf({ "content-type": "application/connect+json", "connect-protocol-version": "1" }),
    body: framed,
    signal,
  });
  if (!answer.ok) throw await errorOf(answer);
  const reader = answer.body.getReader();
  try {
    for await (const { flag, text } of frames(reader)) {
      const message = JSON.parse(text);
      if (flag & END) {
        if (message.error) throw callError(message.error);
        return;
      }
      yield message;
    }
    throw new CallError("unavailable", "The connection was lost.");
  } finally {
    reader.cancel().catch(() => undefined); // it may have failed already
  }
}

async function* frames(reader) {
  let rest = new Uint8Array(0);
  for (;;) {
    let chunk;
    try {
      chunk = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new CallError("unavailable", "The connection was lost.");
    }
    if (chunk.done) return;
    rest = rest.length ? joined(rest, chunk.value) : chunk.value;
    let at = 0;
    while (rest.length - at >= 5) {
      const size = new DataView(rest.buffer, rest.byteOffset + at + 1).getUint32(0);
      if (size > FRAME_BYTES_MAX) throw new CallError("internal", "A message of the server is too large.");
      if (rest.length - at - 5 < size) break;
      yield { flag: rest[at], text: new TextDecoder().decode(rest.subarray(at + 5, at + 5 + size)) };
      at += 5 + size;
    }
    rest = rest.slice(at);
  }
}

function joined(first, second) {
  const whole = new Uint8Array(first.length + second.length);
  whole.set(first);
  whole.set(second, first.length);
  return whole;
}
