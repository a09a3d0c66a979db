/** Checks that golden messages decode to their JSON, and that the JSON encodes to the same bytes. */
import { fromBinary, fromJson, toBinary, toJson } from "@bufbuild/protobuf";

import type { Json } from "./matching.js";
import { same } from "./matching.js";
import { registry } from "./registry.js";
import { report } from "./harness.js";

interface Entry {
  readonly type: string;
  readonly name: string;
  readonly bytes: string;
  readonly json: Json;
}

export function runGolden(text: string): void {
  const content = JSON.parse(text) as { contract: string; messages: Entry[] };
  for (const entry of content.messages) {
    report(`${content.contract}: ${entry.type}: ${entry.name}`, checkEntry(entry, content.contract === "future"));
  }
}

function checkEntry(entry: Entry, future: boolean): string {
  const schema = registry.getMessage(entry.type);
  if (schema === undefined) return "there is no such message";
  const bytes = Buffer.from(entry.bytes, "base64");
  const message = fromBinary(schema, bytes);
  const read = toJson(schema, message, { registry });
  if (!same(read, entry.json)) return `it decodes to ${JSON.stringify(read)}`;
  if (!sameBytes(toBinary(schema, message), bytes)) return "decoding and encoding changes its bytes";
  if (future) return "";
  const written = toBinary(schema, fromJson(schema, entry.json, { registry }));
  return sameBytes(written, bytes) ? "" : "it encodes to other bytes";
}

/** Whether two messages have the same bytes except for the order of fields, which each language chooses. */
function sameBytes(one: Uint8Array, other: Uint8Array): boolean {
  return Buffer.compare(Uint8Array.from(one).sort(), Uint8Array.from(other).sort()) === 0;
}
