// Uses a memory with spans: `main.js SERVER COLLECTOR CLIENT`, CLIENT is the folder of the compiled client.
import { trace } from "@opentelemetry/api";
import { OTLPTraceExporter } from "@opentelemetry/exporter-trace-otlp-grpc";
import { resourceFromAttributes } from "@opentelemetry/resources";
import { BatchSpanProcessor, NodeTracerProvider } from "@opentelemetry/sdk-trace-node";

const [server, collector, folder] = process.argv.slice(2);
const { connect } = await import(`${folder}/index.js`);
const { tracing } = await import(`${folder}/otel.js`);

const exporter = new OTLPTraceExporter({ url: `http://${collector}` });
const provider = new NodeTracerProvider({
  resource: resourceFromAttributes({ "service.name": "agent" }),
  spanProcessors: [new BatchSpanProcessor(exporter)],
});
provider.register(); // its context manager makes spans of an agent the parents of the client's
const client = connect(server, { tracing: tracing(provider) });

await trace.getTracer("an agent").startActiveSpan("invoke_agent joy", async (span) => {
  const memory = await client.createMemory("private-namespace/private-memory");
  await memory.observeBatch(["private words"], { session: "monday" });
  const put = await client.memories.putFragment({
    namespace: "private-namespace",
    memory: "private-memory",
    observation: { externalId: "home", body: { case: "content", value: "private home" } },
  });
  const observing = await memory.observe("private-producer", { session: "tuesday" });
  await observing.send("more private words");
  await observing.close();
  await memory.recallOnce({ observation: { case: "text", value: "private words" }, limit: 2 });
  const recalls = await memory.recall({ session: "tuesday" });
  await trace.getTracer("an agent").startActiveSpan("asking", async (asking) => {
    await recalls.query({ observation: { case: "text", value: "private words" }, limit: 1 });
    asking.end();
  });
  await recalls.close();
  const ids = [put.fragment.id];
  await client.memories.forgetFragments({ namespace: "private-namespace", memory: "private-memory", ids });
  const missing = await client.memory("private-namespace/other").recallOnce("private words").catch((error) => error);
  if (!(missing instanceof Error)) throw new Error("a memory that does not exist answers");
  span.end();
});
client.close();
await provider.shutdown();
