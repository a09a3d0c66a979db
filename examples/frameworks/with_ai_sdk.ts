/**
 * An agent of the AI SDK whose conversation and memory are on a memstream server. Run it twice: it knows your name.
 *
 * npm install ai @ai-sdk/openai-compatible PATH-OF-MEMSTREAM-CLIENT.tgz
 * memstream serve                              # in another terminal
 * OPENAI_API_KEY=... node with_ai_sdk.ts [ADDRESS]
 */
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { connect } from "@memstream/client";
import { memstreamMiddleware } from "@memstream/client/ai";
import { ToolLoopAgent, wrapLanguageModel } from "ai";

const { OPENAI_BASE_URL = "https://api.openai.com/v1", OPENAI_API_KEY = "" } = process.env;
const openai = createOpenAICompatible({ name: "openai", baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY });

const client = connect(process.argv[2] ?? "127.0.0.1:7700");
const memory = memstreamMiddleware(client, { memory: "ai-example/bob", conversation: "ai-example/bob-monday", user: "bob" });
const joy = new ToolLoopAgent({
  model: wrapLanguageModel({ model: openai("gpt-5-mini"), middleware: memory }),
  instructions: "Answer in one sentence.",
});

for (const prompt of ["What is my name?", "I am Bob"]) {
  const { text } = await joy.generate({ prompt });
  console.log(prompt, text);
}
client.close();
