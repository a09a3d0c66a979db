/** Through a front that ends mutual TLS and asks for a token: with it, with another, without a certificate. */
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { connect, MemstreamError } from "../index.js";
import type { Settings } from "../index.js";
import { report } from "./telling.js";

export async function runSecure(address: string, folder: string): Promise<void> {
  const read = (name: string): Buffer => readFileSync(join(folder, name));
  const token = read("token").toString();
  const ca = read("ca.pem");
  const tls = { ca, cert: read("client.pem"), key: read("client.key") };
  const known = await talk(address, { tls, token });
  report("mutual TLS and a token", known ? String(known) : "");
  const other = await talk(address, { tls, token: "another" });
  report("another token", other?.reasonName === "UNAUTHENTICATED" ? "" : `it was ${String(other)}`);
  const unknown = await talk(address, { tls: { ca }, token });
  report("no certificate", unknown?.transient ? "" : `it was ${String(unknown)}`);
}

async function talk(address: string, settings: Settings): Promise<MemstreamError | undefined> {
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
