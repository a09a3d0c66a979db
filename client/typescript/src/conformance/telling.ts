/** What a runner tells the tests, and asks of them: a line of JSON each; see tests/conformance/run.py. */
import { once } from "node:events";
import { createInterface } from "node:readline";

import { Code } from "@connectrpc/connect";

import type { MemstreamError } from "../errors.js";
import type { JsonObject } from "./matching.js";

const answers = createInterface({ input: process.stdin });

export function report(name: string, wrong: string): void {
  console.log(JSON.stringify({ case: name, wrong }));
}

/** Has the server killed or stopped and started again, or all connections cut. */
export async function ask(what: string): Promise<void> {
  const answered = once(answers, "line");
  console.log(JSON.stringify({ ask: what }));
  await answered;
}

/** Something was not as the case says. */
export class Wrong extends Error {}

/** An error as cases write it. */
export function told(error: MemstreamError): JsonObject {
  return {
    code: Code[error.code].replaceAll(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase(),
    reason: error.reasonName,
    details: { ...error.reasonDetails },
    violations: error.violations.map((one) => one.field),
  };
}
