/** What a runner tells the tests, and asks of them: a line of JSON each; see tests/conformance/run.py. */
import { once } from "node:events";
import { createInterface } from "node:readline";

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
