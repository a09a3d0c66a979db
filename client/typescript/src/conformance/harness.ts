/** Reports to the tests and requests faults from them, one line of JSON each; see tests/conformance/run.py. */
import { once } from "node:events";
import { createInterface } from "node:readline";

import { Code } from "@connectrpc/connect";

import type { MemstreamError } from "../errors.js";
import type { JsonObject } from "./matching.js";

const answers = createInterface({ input: process.stdin });

export function report(name: string, wrong: string): void {
  console.log(JSON.stringify({ case: name, wrong }));
}

/** Requests a fault: the server is killed or stopped and restarted, or all connections are cut. */
export async function requestFault(what: string): Promise<void> {
  const answered = once(answers, "line");
  console.log(JSON.stringify({ ask: what }));
  await answered;
}

/** A result differs from what the case expects. */
export class Mismatch extends Error {}

/** Returns an error in the form of the cases. */
export function errorAsJson(error: MemstreamError): JsonObject {
  return {
    code: Code[error.code].replaceAll(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase(),
    reason: error.reasonName,
    details: { ...error.reasonDetails },
    violations: error.violations.map((one) => one.field),
  };
}
