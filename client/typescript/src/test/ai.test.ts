/** The middleware and the tools for the AI SDK, with its own mock model and a real server: MEMSTREAM_TARGET names it. */
import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";
import { after, test } from "node:test";

import { generateText, isStepCount, jsonSchema, stepCountIs, streamText, tool, wrapLanguageModel } from "ai";
import type { ModelMessage } from "ai";
import { convertArrayToReadableStream, MockLanguageModelV4 } from "ai/test";

import { memstreamMiddleware, memstreamTools } from "../ai.js";
import type { MemoryOptions } from "../ai.js";
import { connect, MemstreamError } from "../index.js";

const client = connect(process.env["MEMSTREAM_TARGET"] ?? "");
after(() => { client.close(); });

const usage = {
  inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 }, outputTokens: { total: 1, text: 1, reasoning: 0 },
};
const stop = { unified: "stop" as const, raw: "stop" };
type Part = { type: "text"; text: string } | { type: "tool-call"; toolCallId: string; toolName: string; input: string };

/** A model that gives these replies in order; the prompts that it got. */
function scripted(...replies: (string | Part[] | Error)[]): { model: MockLanguageModelV4; prompts: () => string[] } {
  const model = new MockLanguageModelV4({
    doGenerate: () => {
      const reply = replies.shift() ?? "Hello.";
      if (reply instanceof Error) throw reply;
      const content: Part[] = typeof reply === "string" ? [{ type: "text", text: reply }] : reply;
      return Promise.resolve({ content, finishReason: stop, usage, warnings: [] });
    },
  });
  return { model, prompts: () => model.doGenerateCalls.map(({ prompt }) => JSON.stringify(prompt)) };
}

const namespace = (): string => `ai-${randomUUID().slice(0, 12)}`;
const wrap = (model: MockLanguageModelV4, options: MemoryOptions) =>
  wrapLanguageModel({ model, middleware: memstreamMiddleware(client, options) });

async function bodiesOf(path: string): Promise<{ role: string; content: unknown }[]> {
  const found: { role: string; content: unknown }[] = [];
  for await (const { body = "" } of client.conversation(path).messages()) found.push(JSON.parse(body) as (typeof found)[0]);
  return found;
}

/** Roles and texts of a conversation. */
async function saidIn(path: string): Promise<string[]> {
  return (await bodiesOf(path)).map(({ role, content }) => {
    const texts = (content as { text?: string; type: string }[]).map((part) => part.text ?? part.type);
    return `${role}: ${texts.join("+")}`;
  });
}

void test("a conversation is restored in another session", async () => {
  const conversation = `${namespace()}/monday`;
  const first = scripted("Hello Bob.");
  await generateText({ model: wrap(first.model, { conversation, user: "bob" }), instructions: "Be kind.", prompt: "I am Bob" });
  const second = scripted("Bob.");
  await generateText({ model: wrap(second.model, { conversation }), instructions: "Be kind.", prompt: "What is my name?" });
  const [prompt = []] = second.model.doGenerateCalls.map((call) => call.prompt);
  assert.deepEqual(prompt.map(({ role }) => role), ["system", "user", "assistant", "user"]);
  assert.deepEqual(await saidIn(conversation), [
    "user: I am Bob", "assistant: Hello Bob.", "user: What is my name?", "assistant: Bob.",
  ]);
  assert.equal((await client.conversation(conversation).describe()).labels["user"], "bob");
});

void test("an application may send the whole chat", async () => {
  const conversation = `${namespace()}/monday`;
  const { model, prompts } = scripted("one", "two", "three");
  const wrapped = wrap(model, { conversation });
  const messages: ModelMessage[] = [];
  for (const content of ["a", "b", "b"]) {
    messages.push({ role: "user", content });
    messages.push(...(await generateText({ model: wrapped, messages })).responseMessages);
  }
  assert.deepEqual(await saidIn(conversation), [
    "user: a", "assistant: one", "user: b", "assistant: two", "user: b", "assistant: three",
  ]);
  assert.equal(prompts()[2]?.split('"a"').length, 2, "nothing is sent twice");
  const short = scripted();
  await generateText({ model: wrap(short.model, { conversation, historyMax: 3 }), messages: [...messages, { role: "user", content: "c" }] });
  assert.equal((await saidIn(conversation)).length, 8, "a chat longer than the history is recognised");
});

void test("the same words twice are two turns", async () => {
  const conversation = `${namespace()}/monday`;
  const wrapped = wrap(scripted().model, { conversation });
  for (let turn = 0; turn < 2; turn += 1) await generateText({ model: wrapped, prompt: "Go on" });
  assert.deepEqual(await saidIn(conversation), ["user: Go on", "assistant: Hello.", "user: Go on", "assistant: Hello."]);
});

void test("historyMax restores whole turns alone", async () => {
  const conversation = `${namespace()}/monday`;
  const wrapped = wrap(scripted().model, { conversation });
  for (const prompt of ["a", "b", "c"]) await generateText({ model: wrapped, prompt });
  const rolesFor = async (historyMax: number) => {
    const { model } = scripted();
    await generateText({ model: wrap(model, { conversation, historyMax }), prompt: "What?" });
    return model.doGenerateCalls[0]?.prompt.map(({ role }) => role);
  };
  assert.deepEqual(await rolesFor(3), ["user", "assistant", "user"], "the reply without its question is left out");
  assert.deepEqual(await rolesFor(0), ["user"]);
});

const callOf = (toolCallId: string): Part[] => [{ type: "tool-call", toolCallId, toolName: "look", input: "{}" }];
const inputSchema = jsonSchema<object>({ type: "object", properties: {} });

void test("a tool call is stored with its output of 1 MB", async () => {
  const conversation = `${namespace()}/monday`;
  const { model } = scripted(callOf("c1"), "Done.");
  const seen: string[][] = [];
  const look = tool({ inputSchema, execute: async () => {
    seen.push(await saidIn(conversation));
    return "x".repeat(1_000_000);
  } });
  await generateText({ model: wrap(model, { conversation }), tools: { look }, prompt: "Look", stopWhen: isStepCount(3) });
  assert.deepEqual(seen, [["user: Look"]], "a crash in the tool leaves no call without its output");
  const stored = await bodiesOf(conversation);
  assert.deepEqual(stored.map(({ role }) => role), ["user", "assistant", "tool", "assistant"]);
  assert.ok(JSON.stringify(stored[2]).length > 1_000_000);
  const later = scripted();
  await generateText({ model: wrap(later.model, { conversation }), prompt: "And?" });
  const [prompt = []] = later.model.doGenerateCalls.map((call) => call.prompt);
  assert.deepEqual(prompt.slice(0, 3).map(toPlain), (model.doGenerateCalls[1]?.prompt ?? []).map(toPlain), "as it was sent");
});

const toPlain = (value: unknown): unknown => JSON.parse(JSON.stringify(value));

void test("a turn that failed is repeated without a copy", async () => {
  const conversation = `${namespace()}/monday`;
  const wrapped = wrap(scripted(new Error("overloaded"), "Hello.").model, { conversation });
  await assert.rejects(generateText({ model: wrapped, prompt: "Hi", maxRetries: 0 }), /overloaded/);
  assert.deepEqual(await saidIn(conversation), ["user: Hi"]);
  await generateText({ model: wrapped, prompt: "Hi" });
  assert.deepEqual(await saidIn(conversation), ["user: Hi", "assistant: Hello."]);
});

void test("shows recalled memories and stores none of them", async () => {
  const space = namespace();
  const options = { memory: `${space}/bob`, conversation: `${space}/monday` };
  await generateText({ model: wrap(scripted("I see.").model, options), prompt: "I like plays about trains." });
  const later = scripted("Trains.");
  const tuesday = { ...options, conversation: `${space}/tuesday` };
  await generateText({ model: wrap(later.model, tuesday), prompt: "What kind of plays do I like?" });
  assert.match(later.prompts()[0] ?? "", /I like plays about trains/);
  assert.deepEqual(await saidIn(tuesday.conversation), ["user: What kind of plays do I like?", "assistant: Trains."]);
  const { fragments } = await client.memories.listFragments({ namespace: space, memory: "bob" });
  assert.deepEqual(fragments.map(({ body, session }) => [body.value, session]), [
    ["I like plays about trains.", "monday"], ["I see.", "monday"],
    ["What kind of plays do I like?", "tuesday"], ["Trains.", "tuesday"],
  ]);
});

void test("blocks are in the system prompt", async () => {
  const memory = `${namespace()}/bob`;
  await client.ensureMemory(memory);
  const [space = "", name = ""] = memory.split("/");
  await client.blocks.putBlock({ namespace: space, memory: name, block: "persona", text: "You are Joy." });
  const { model } = scripted();
  await generateText({ model: wrap(model, { memory, blocks: [`${memory}#persona`] }), instructions: "Be kind.", prompt: "Hi" });
  const heads = model.doGenerateCalls[0]?.prompt.filter(({ role }) => role === "system").map(({ content }) => content);
  assert.equal(heads?.length, 2);
  assert.match(JSON.stringify(heads[1]), /You are Joy\./);
});

void test("a stream is stored before it ends", async () => {
  const conversation = `${namespace()}/monday`;
  const model = new MockLanguageModelV4({
    doStream: () => Promise.resolve({ stream: convertArrayToReadableStream([
      { type: "stream-start" as const, warnings: [] },
      { type: "text-start" as const, id: "1" },
      { type: "text-delta" as const, id: "1", delta: "Hello " },
      { type: "text-delta" as const, id: "1", delta: "Bob." },
      { type: "text-end" as const, id: "1" },
      { type: "finish" as const, finishReason: stop, usage },
    ]) }),
  });
  assert.equal(await streamText({ model: wrap(model, { conversation }), prompt: "I am Bob" }).text, "Hello Bob.");
  assert.deepEqual(await saidIn(conversation), ["user: I am Bob", "assistant: Hello Bob."]);
});

void test("a stream that is cut off stores no reply", async () => {
  const conversation = `${namespace()}/monday`;
  const model = new MockLanguageModelV4({
    doStream: () => Promise.resolve({ stream: convertArrayToReadableStream([
      { type: "text-start" as const, id: "1" }, { type: "text-delta" as const, id: "1", delta: "Hel" },
    ]) }),
  });
  await streamText({ model: wrap(model, { conversation }), prompt: "Hi", onError: () => undefined }).consumeStream();
  assert.deepEqual(await saidIn(conversation), ["user: Hi"]);
});

const ODD: Record<string, [value: unknown, kept: unknown]> = {
  null: [null, null],
  nested: [{ a: [null, { b: 1.5 }] }, { a: [null, { b: 1.5 }] }],
  date: [new Date(0), "1970-01-01T00:00:00.000Z"],
  bytes: [{ bytes: new Uint8Array([1, 2]) }, { bytes: { 0: 1, 1: 2 } }],
  NaN: [{ a: NaN }, { a: null }],
};

for (const [name, [value, kept]] of Object.entries(ODD)) {
  void test(`a tool output with ${name} is kept as JSON`, async () => {
    const conversation = `${namespace()}/monday`;
    const look = tool({ inputSchema, execute: () => value });
    const model = wrap(scripted(callOf("c1"), "Done.").model, { conversation });
    await generateText({ model, tools: { look }, prompt: "Look", stopWhen: stepCountIs(3) });
    const output = (await bodiesOf(conversation))[2]?.content as { output: { value: unknown } }[];
    assert.deepEqual(output[0]?.output.value, kept);
  });
}

for (const [name, value] of Object.entries({ bigint: 1n, circle: (() => { const a: unknown[] = []; a.push(a); return a; })() })) {
  void test(`a tool output with ${name} fails as without memstream`, async () => {
    const conversation = `${namespace()}/monday`;
    const look = tool({ inputSchema, execute: () => value });
    const run = (model: Parameters<typeof generateText>[0]["model"]) =>
      generateText({ model, tools: { look }, prompt: "Look", stopWhen: isStepCount(3), maxRetries: 0 });
    const sending = new MockLanguageModelV4({
      doGenerate: ({ prompt }) => { // as a provider does
        JSON.stringify(prompt);
        return Promise.resolve({ content: callOf("c1"), finishReason: stop, usage, warnings: [] });
      },
    });
    const nameOf = (error: unknown) => (error as Error).name;
    const own = await run(sending).then(() => "", nameOf);
    assert.notEqual(own, "");
    assert.equal(await run(wrap(scripted(callOf("c1")).model, { conversation })).then(() => "", nameOf), own);
    assert.deepEqual(await saidIn(conversation), ["user: Look"], "and nothing of the step is stored");
  });
}

void test("files are sent again as they were", async () => {
  const conversation = `${namespace()}/monday`;
  const messages: ModelMessage[] = [{ role: "user", content: [
    { type: "text", text: "Look" },
    { type: "file", data: new Uint8Array([1, 2, 3]), mediaType: "image/png" },
    { type: "file", data: new URL("data:image/png;base64,AQID"), mediaType: "image/png" },
  ] }];
  const first = scripted();
  await generateText({ model: wrap(first.model, { conversation }), messages });
  const later = scripted();
  await generateText({ model: wrap(later.model, { conversation }), prompt: "And?" });
  const filesOf = (model: MockLanguageModelV4) => toPlain(model.doGenerateCalls[0]?.prompt[0]?.content);
  const bytesAsText = (value: unknown) => JSON.stringify(value).replaceAll('{"0":1,"1":2,"2":3}', '"AQID"');
  assert.equal(bytesAsText(filesOf(later.model)), bytesAsText(filesOf(first.model)));
});

void test("without a server a turn fails, or continues by onError", async () => {
  const away = connect("127.0.0.1:1", { retry: { callsMs: 0 } });
  const errors: unknown[] = [];
  const turn = (options: MemoryOptions) => generateText({
    model: wrapLanguageModel({ model: scripted().model, middleware: memstreamMiddleware(away, options) }),
    prompt: "Hi", maxRetries: 0,
  });
  await assert.rejects(turn({ memory: "a/b" }), MemstreamError);
  const { text } = await turn({ memory: "a/b", onError: (error) => errors.push(error) });
  assert.equal(text, "Hello.");
  assert.equal(errors.length, 2, "of the recall and of the observation");
  await assert.rejects(turn({ conversation: "a/b", onError: () => undefined }), MemstreamError);
  away.close();
});

void test("tools recall, observe and forget", async () => {
  const { recall, observe, forget } = memstreamTools(client, `${namespace()}/bob`);
  const run = async (which: { execute?: unknown }, input: object) =>
    (which.execute as (input: object, options: object) => Promise<string>)(input, { toolCallId: "c", messages: [] });
  assert.equal(await run(recall, { query: "What does Bob like?" }), "Nothing is known.");
  assert.equal(await run(observe, { text: "Bob likes trains.\nAnd ships." }), "Stored.");
  const known = await run(recall, { query: "What does Bob like?" });
  assert.match(known, /^\w{26} \d{4}-\d\d-\d\d: Bob likes trains\.\n {2}And ships\.$/);
  assert.equal(await run(forget, { ids: [known.slice(0, 26)] }), "Forgot 1.");
  assert.equal(await run(recall, { query: "What does Bob like?" }), "Nothing is known.");
});

void test("a model calls the tools", async () => {
  const tools = memstreamTools(client, `${namespace()}/bob`);
  const { model, prompts } = scripted(
    [{ type: "tool-call", toolCallId: "c1", toolName: "observe", input: '{"text":"Bob likes trains."}' }],
    [{ type: "tool-call", toolCallId: "c2", toolName: "recall", input: '{"query":"What does Bob like?"}' }],
  );
  await generateText({ model, tools, prompt: "Remember", stopWhen: isStepCount(5) });
  assert.match(prompts()[2] ?? "", /Bob likes trains\./);
  assert.ok(model.doGenerateCalls[0]?.tools?.every((one) => one.type === "function" && !JSON.stringify(one.inputSchema).includes("$ref")));
});

void test("options that are unknown or contradict are errors", () => {
  const bad: [MemoryOptions, RegExp][] = [
    [{}, /neither a memory nor a conversation/],
    [{ memory: "joy" }, /namespace\/name/],
    [{ memory: "a/b", historyMax: -1 }, /historyMax/],
    [{ memory: "a/b", colour: 1 } as MemoryOptions, /colour/],
  ];
  for (const [options, said] of bad) assert.throws(() => memstreamMiddleware(client, options), said);
});
