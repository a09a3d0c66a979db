// Talks to `memstream mcp` with MCP's own TypeScript client: over standard input, with the command in the arguments, or
// over HTTP, with the URL. Prints what it saw as JSON.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { ListRootsRequestSchema, ResourceUpdatedNotificationSchema } from "@modelcontextprotocol/sdk/types.js";

const [root, where, ...words] = process.argv.slice(2);
const transport = where.startsWith("http")
  ? new StreamableHTTPClientTransport(new URL(where))
  : new StdioClientTransport({ command: where, args: words, env: process.env });
const client = new Client({ name: "typescript", version: "1" }, { capabilities: { roots: {} } });
client.setRequestHandler(ListRootsRequestSchema, () => ({ roots: [{ uri: root }] }));
const updated = new Promise((seen) =>
  client.setNotificationHandler(ResourceUpdatedNotificationSchema, ({ params }) => seen(params.uri)),
);
await client.connect(transport);
const call = async (name, given) => {
  const { content, structuredContent, isError } = await client.callTool({ name, arguments: given });
  return { text: content[0].text, structure: structuredContent, isError: isError ?? false };
};

const { tools } = await client.listTools();
const said = await call("observe", { content: "Bob takes tea", speaker: "user", metadata: null, key: "" });
const halves = await call("observe", { content: "half an emoji \ud83d" });
const many = await Promise.all(Array.from({ length: 40 }, (_, n) => call("observe", { content: `fact number ${n}` })));
const cancelled = new AbortController();
const stopped = client
  .callTool({ name: "recall", arguments: { query: "tea" } }, undefined, { signal: cancelled.signal })
  .then(() => "answered", (error) => String(error.message));
cancelled.abort("the user pressed stop");
await stopped;
const wrong = await call("recall", { query: "tea", top_k: 3 });
const recalled = await call("recall", { query: "What does Bob take?", limit: 1 });
await call("write_block", { name: "persona", text: "You are Joy." });
const { resources } = await client.listResources();
await client.subscribeResource({ uri: resources[0].uri });
await call("edit_block", { name: "persona", new: "You like bells." });
const notified = await updated;
const read = await client.readResource({ uri: resources[0].uri });
const listed = await call("list", { limit: 200 });
await client.close();
console.log(
  JSON.stringify({ tools: tools.map((tool) => tool.name), said, halves, many, wrong, recalled, notified, read, listed }),
);
