/** An agent of the AI SDK with its conversation on a server; tests/toolchains/test_ai_sdk.py drives it by lines of JSON. */
import { createInterface } from "node:readline";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, streamText, tool, wrapLanguageModel } from "ai";

import { memstreamMiddleware } from "../ai.js";
import { connect, memoryName } from "../index.js";

const { MEMSTREAM_TARGET = "", MEMSTREAM_TEST_NAMESPACE = "", OPENAI_BASE_URL = "" } = process.env;
const LOG = "x".repeat(1_000_000) + " The password is swordfish.";

const client = connect(MEMSTREAM_TARGET);
const scripted = createOpenAICompatible({ name: "scripted", baseURL: OPENAI_BASE_URL, apiKey: "secret" })("scripted");
const nothing = jsonSchema<object>({ type: "object", properties: {} });
const tools = {
  read_log: tool({ description: "Reads the log.", inputSchema: nothing, execute: () => LOG }),
  crash: tool({ description: "Ends the process.", inputSchema: nothing, execute: () => process.kill(process.pid, "SIGKILL") }),
};

async function answer(session: string, text: string): Promise<string> {
  const conversation = `${MEMSTREAM_TEST_NAMESPACE}/${memoryName(session)}`;
  const model = wrapLanguageModel({ model: scripted, middleware: memstreamMiddleware(client, { conversation }) });
  const call = { model, tools, prompt: text, stopWhen: isStepCount(5), maxRetries: 0 };
  return text.includes("?") ? streamText({ ...call, onError: () => undefined }).text : (await generateText(call)).text;
}

console.log("ready");
for await (const line of createInterface({ input: process.stdin })) {
  const { session, text } = JSON.parse(line) as { session: string; text: string };
  const said = await answer(session, text).then((reply) => ({ reply }), (error: unknown) => ({ error: String(error) }));
  console.log(JSON.stringify(said));
}
client.close();
