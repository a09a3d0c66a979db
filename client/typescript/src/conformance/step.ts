/** A client step of a conformance case: what it was given, and what its client does in more than one step. */
import { MemstreamError } from "../index.js";
import type { Client, Memory, RecallStream } from "../index.js";
import { compareValues, isObject, textOf } from "./matching.js";
import type { JsonObject } from "./matching.js";
import { requestFault, errorAsJson, Mismatch } from "./harness.js";

export class Step {
  readonly producer: string;
  readonly upto: number;

  constructor(
    readonly address: string,
    readonly client: Client,
    readonly memory: Memory,
    readonly given: JsonObject,
  ) {
    this.producer = textOf(given["producer"]);
    this.upto = Number(given["upto"]);
  }

  contentOf(number: number): string {
    return `word${number} of ${this.producer}`;
  }

  /** Asks for the fault that the step has at this number, if any. */
  async askAt(number: number): Promise<void> {
    const what = isObject(this.given["at"]) ? this.given["at"][String(number)] : undefined;
    if (typeof what === "string") await requestFault(what);
  }

  checkError(thrown: unknown): void {
    const wrong = thrown instanceof MemstreamError ? compareValues(this.given["error"] ?? {}, errorAsJson(thrown), "error") : "no type";
    if (wrong) throw new Mismatch(`it failed with ${String(thrown)}: ${wrong}`);
  }

  /** Waits for a failure and checks that it is the expected one. */
  async expectFailure(attempt: Promise<unknown>): Promise<void> {
    await attempt.then(
      () => { throw new Mismatch("it did not fail"); },
      (thrown: unknown) => { this.checkError(thrown); },
    );
  }

  async queryOne(stream: RecallStream, number: number): Promise<void> {
    const answer = await stream.query({ observation: { case: "text", value: `word${number}` }, limit: 1 });
    const contents = answer.recollections.map((one) => one.fragment?.body.value);
    if (contents.length !== 1 || contents[0] !== this.contentOf(number)) {
      throw new Mismatch(`query ${number} found ${JSON.stringify(contents)}`);
    }
  }
}
