/** Runs the cases and golden messages of tests/conformance with the TypeScript client. */
import { readFileSync } from "node:fs";

import { runCases } from "./cases.js";
import { runGolden } from "./golden.js";
import { runSecure } from "./secure.js";

const [what, address = "", ...files] = process.argv.slice(2);
for (const file of files) {
  if (what === "secure") await runSecure(address, file);
  else if (what === "golden") runGolden(readFileSync(file, "utf8"));
  else await runCases(address, readFileSync(file, "utf8"));
}
process.exit(0);
