/** Golden bytes mean what they meant, and what they meant makes the same bytes. */
import { fromBinary, fromJson, toBinary, toJson } from "@bufbuild/protobuf";

import type { Json } from "./matching.js";
import { same } from "./matching.js";
import { registry } from "./registry.js";
import { report } from "./telling.js";

interface Entry {
  readonly type: string;
  readonly name: string;
  readonly bytes: string;
  readonly json: Json;
}

export function runGolden(text: string): void {
  const content = JSON.parse(text) as { contract: string; messages: Entry[] };
  for (const entry of content.messages) {
    report(`${content.contract}: ${entry.type}: ${entry.name}`, check(entry, content.contract === "future"));
  }
}

function check(entry: Entry, future: boolean): string {
  const schema = registry.getMessage(entry.type);
  if (schema === undefined) return "there is no such message";
  const bytes = Buffer.from(entry.bytes, "base64");
  const message = fromBinary(schema, bytes);
  const read = toJson(schema, message, { registry });
  if (!same(read, entry.json)) return `it is read as ${JSON.stringify(read)}`;
  if (!sameBytes(toBinary(schema, message), bytes)) return "passed on, it has other bytes";
  if (future) return "";
  const written = toBinary(schema, fromJson(schema, entry.json, { registry }));
  return sameBytes(written, bytes) ? "" : "it is written with other bytes";
}

/** Whether they are the same but for the order of fields, which languages choose. */
function sameBytes(one: Uint8Array, other: Uint8Array): boolean {
  return Buffer.compare(Uint8Array.from(one).sort(), Uint8Array.from(other).sort()) === 0;
}
