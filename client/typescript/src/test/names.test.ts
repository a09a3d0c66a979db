/** Names of users' memories are those of all languages. */
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { MemstreamError } from "../errors.js";
import { memoryName, userIdOf } from "../names.js";

interface Table {
  names: Record<string, string>;
  refused_ids: string[];
  refused_names: string[];
}

/** The file of the repository that this test, or its copy, is in. */
function findUp(path: string): string {
  let folder = dirname(fileURLToPath(import.meta.url));
  while (!existsSync(join(folder, path))) {
    assert.notEqual(folder, dirname(folder), `no ${path}`);
    folder = dirname(folder);
  }
  return join(folder, path);
}

void test("names are those of all languages", () => {
  const table = JSON.parse(readFileSync(findUp("tests/conformance/user_ids.json"), "utf8")) as Table;
  assert(Object.keys(table.names).length >= 10 && table.refused_ids.length >= 2 && table.refused_names.length >= 5);
  for (const [id, name] of Object.entries(table.names)) {
    assert.equal(memoryName(id), name);
    assert.equal(userIdOf(name), id);
  }
  for (const id of [...table.refused_ids, "\ud83d"]) assert.throws(() => memoryName(id), MemstreamError, id);
  for (const name of table.refused_names) assert.throws(() => userIdOf(name), MemstreamError, name);
});
