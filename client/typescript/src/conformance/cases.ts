/** Runs the cases message by message with the generated code. Each stream has its own connection. */
import { randomBytes } from "node:crypto";

import { create, fromBinary, fromJson, toBinary, toJson } from "@bufbuild/protobuf";
import type { DescMethod, JsonValue, Message } from "@bufbuild/protobuf";
import { Code } from "@connectrpc/connect";
import type { StreamResponse, Transport } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { asError } from "../errors.js";
import { WRITE_BYTES_MAX } from "../link.js";
import { runClientStep } from "./clients.js";
import { compareValues, fillPlaceholders, isObject, valueAt, textOf } from "./matching.js";
import type { Json, JsonObject } from "./matching.js";
import { registry } from "./registry.js";
import { requestFault, report, errorAsJson, Mismatch } from "./harness.js";

const READ_MS = 30_000;

function methodOf(name: string): DescMethod {
  const [service = "", method = ""] = name.split("/");
  const found = registry.getService(`memstream.v1.${service}`)?.methods.find((one) => one.name === method);
  if (found === undefined) throw new Mismatch(`there is no ${name}`);
  return found;
}

/** Returns a method's request; `unknown` has base64 bytes of fields that a later contract may add. */
function newRequest(method: DescMethod, content: Json, step: JsonObject): Message {
  const known = fromJson(method.input, content, { registry });
  const unknown = Buffer.from(textOf(step["unknown"] ?? ""), "base64");
  return fromBinary(method.input, Buffer.concat([toBinary(method.input, known), unknown]));
}

/** An open streaming call and its queue of requests. */
class Stream {
  private readonly queue: Message[] = [];
  private readonly abort = new AbortController();
  private readonly answers: AsyncIterator<Message>;
  private ended = false;
  private wake: () => void = () => undefined;

  constructor(
    transport: Transport,
    private readonly method: DescMethod,
    headers: Record<string, string>,
  ) {
    const response = (
      transport.stream as (...given: unknown[]) => Promise<StreamResponse>
    )(method, this.abort.signal, undefined, headers, this.requests());
    response.catch(() => undefined); // the reader of `answers` gets the error
    this.answers = answersOf(response)[Symbol.asyncIterator]();
  }

  send(step: JsonObject): void {
    this.queue.push(newRequest(this.method, step["message"] ?? {}, step));
    this.ended ||= this.method.methodKind === "server_streaming";
    this.wake();
  }

  /** Reads messages until one is as expected. */
  async receive(expected: Json): Promise<void> {
    const seen: string[] = [];
    const late = setTimeout(() => { this.cancel(); }, READ_MS);
    try {
      for (;;) {
        const next = await this.answers.next();
        if (next.done) throw new Mismatch(`the stream ended; received before: ${seen.join()}`);
        const actual = toJson(this.method.output, next.value, { registry });
        seen.push(JSON.stringify(actual));
        if (compareValues(expected, actual, "message") === "") return;
      }
    } catch (thrown) {
      if (thrown instanceof Mismatch) throw thrown;
      throw new Mismatch(`the stream ended: ${asError(thrown).message}; received before: ${seen.join()}`);
    } finally {
      clearTimeout(late);
    }
  }

  async finish(expected: Json | undefined): Promise<void> {
    if (expected === undefined) {
      this.ended = true;
      this.wake();
    }
    const late = setTimeout(() => { this.cancel(); }, READ_MS);
    try {
      while (!(await this.answers.next()).done);
    } catch (thrown) {
      checkError(expected, thrown);
      return;
    } finally {
      clearTimeout(late);
    }
    if (expected !== undefined) throw new Mismatch("the stream ended without an error");
  }

  cancel(): void {
    this.abort.abort();
    this.wake();
  }

  private async *requests(): AsyncGenerator<Message> {
    while (!this.abort.signal.aborted) {
      const next = this.queue.shift();
      if (next) yield next;
      else if (this.ended) return;
      else await new Promise<void>((resolve) => { this.wake = resolve; });
    }
  }
}

async function* answersOf(response: Promise<StreamResponse>): AsyncGenerator<Message> {
  yield* (await response).message as AsyncIterable<Message>;
}

class Case {
  private readonly kept = new Map([["ns", `c-${randomBytes(6).toString("hex")}`]]);
  private readonly streams = new Map<string, Stream>();
  private calling: Transport;

  constructor(private readonly address: string) {
    this.calling = this.connect();
  }

  async run(steps: readonly JsonObject[]): Promise<void> {
    for (const [number, step] of steps.entries()) {
      try {
        await this.step(fillPlaceholders(step, this.kept) as JsonObject);
      } catch (thrown) {
        throw new Mismatch(`step ${number + 1}: ${thrown instanceof Error ? thrown.message : String(thrown)}`);
      }
    }
    for (const stream of this.streams.values()) stream.cancel();
  }

  private connect(): Transport {
    return createGrpcTransport({ baseUrl: `http://${this.address}`, writeMaxBytes: WRITE_BYTES_MAX });
  }

  private async step(step: JsonObject): Promise<void> {
    if (typeof step["call"] === "string") await this.call(step["call"], step);
    else if (typeof step["open"] === "string") {
      const made = new Stream(this.connect(), methodOf(textOf(step["stream"])), headersOf(step));
      this.streams.set(step["open"], made);
    } else if (step["send"] !== undefined) this.stream(step["send"]).send(step);
    else if (step["receive"] !== undefined) await this.stream(step["receive"]).receive(step["message"] ?? {});
    else if (step["finish"] !== undefined) await this.stream(step["finish"]).finish(step["error"]);
    else if (step["cancel"] !== undefined) this.stream(step["cancel"]).cancel();
    else if (typeof step["ask"] === "string") {
      await requestFault(step["ask"]);
      this.calling = this.connect();
    } else await runClientStep(this.address, step);
  }

  private stream(name: Json): Stream {
    const found = this.streams.get(textOf(name));
    if (found === undefined) throw new Mismatch(`no stream ${textOf(name)} is open`);
    return found;
  }

  private async call(name: string, step: JsonObject): Promise<void> {
    const method = methodOf(name);
    const limit = typeof step["timeoutS"] === "number" ? step["timeoutS"] * 1000 : READ_MS;
    let actual: JsonValue;
    try {
      const request = create(method.input, newRequest(method, step["request"] ?? {}, step));
      const unary = (this.calling.unary as (...given: unknown[]) => Promise<{ message: Message }>).bind(this.calling);
      const { message } = await unary(method, undefined, limit, headersOf(step), request);
      actual = toJson(method.output, message, { registry });
    } catch (thrown) {
      checkError(step["error"], thrown);
      return;
    }
    if (step["error"] !== undefined) throw new Mismatch(`it did not fail, it answered ${JSON.stringify(actual)}`);
    const wrong = compareValues(step["answer"] ?? {}, actual, "answer");
    if (wrong) throw new Mismatch(wrong);
    const keep = isObject(step["keep"]) ? step["keep"] : {};
    for (const [key, path] of Object.entries(keep)) this.kept.set(key, valueAt(actual, textOf(path)));
  }
}

function headersOf(step: JsonObject): Record<string, string> {
  const given = isObject(step["metadata"]) ? step["metadata"] : {};
  return Object.fromEntries(Object.entries(given).map(([key, value]) => [key, textOf(value)]));
}

function checkError(expected: Json | undefined, thrown: unknown): void {
  const error = asError(thrown);
  if (expected === undefined) throw new Mismatch(`it failed: ${error.message}`);
  if (isObject(expected) && expected["broken"] === true) {
    const broken = [Code.Unavailable, Code.Internal, Code.Unknown, Code.Canceled];
    if (!broken.includes(error.code)) throw new Mismatch(`it failed with ${error.message}`);
    return;
  }
  const wrong = compareValues(expected, errorAsJson(error), "error");
  if (wrong) throw new Mismatch(wrong);
}

export async function runCases(address: string, text: string): Promise<void> {
  const content = JSON.parse(text) as { cases: { name: string; steps: JsonObject[] }[] };
  for (const { name, steps } of content.cases) {
    let wrong = "";
    try {
      await new Case(address).run(steps);
    } catch (thrown) {
      if (!(thrown instanceof Mismatch)) throw thrown;
      wrong = thrown.message;
    }
    report(name, wrong);
  }
}
