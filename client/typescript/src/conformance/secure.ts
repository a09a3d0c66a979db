/** Connects through a proxy that terminates mutual TLS and requires a token: valid, with a wrong token, without a certificate. */
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { connect, MemstreamError } from "../index.js";
import type { Settings } from "../index.js";
import { report } from "./harness.js";

export async function runSecure(address: string, folder: string): Promise<void> {
  const read = (name: string): Buffer => readFileSync(join(folder, name));
  const token = read("token").toString();
  const ca = read("ca.pem");
  const tls = { ca, cert: read("client.pem"), key: read("client.key") };
  const known = await observeAndRecall(address, { tls, token });
  report("mutual TLS and a token", known ? String(known) : "");
  const other = await observeAndRecall(address, { tls, token: "another" });
  report("another token", other?.reasonName === "UNAUTHENTICATED" ? "" : `it failed with ${String(other)}`);
  const unknown = await observeAndRecall(address, { tls: { ca }, token });
  report("no certificate", unknown?.transient ? "" : `it failed with ${String(unknown)}`);
}

async function observeAndRecall(address: string, settings: Settings): Promise<MemstreamError | undefined> {
  const client = connect(address, { ...settings, retry: { firstMs: 1_000 } });
  try {
    const memory = await client.ensureMemory("secure/joy");
    const stream = await memory.observe("typescript");
    await stream.send("green tea");
    await stream.close();
    await memory.recallOnce("tea");
  } catch (thrown) {
    if (thrown instanceof MemstreamError) return thrown;
    throw thrown;
  } finally {
    client.close();
  }
  return undefined;
}
