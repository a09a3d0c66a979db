// The calls of a view as programs: curl, Python, TypeScript. A key is never part of them.

import { apiRoot, recordedCalls } from "./api.js";
import { action, h, notify, select, show } from "./dom.js";

const LANGUAGES = [["curl", "curl", toCurl], ["python", "Python", toPython], ["typescript", "TypeScript", toTypeScript]];
const STREAMS = new Set(["StreamService/Watch", "ConversationService/WatchMessages", "MemoryService/ExportMemories"]);

/** A box with the calls that the view has made until it is opened. */
export function copyBox() {
  const body = h("div");
  const box = h("details", { class: "box copies" }, h("summary", null, "Copy as curl, Python or TypeScript"), body);
  box.addEventListener("toggle", () => { if (box.open) drawCopies(body); });
  return box;
}

function drawCopies(body) {
  const calls = recordedCalls();
  if (!calls.length) return show(body, h("p", { class: "empty" }, "This view has made no call."));
  const which = select("call", calls.map(({ method }, place) => [String(place), method]), String(calls.length - 1));
  const language = select("language", LANGUAGES.map(([name, label]) => [name, label]), "curl");
  const text = h("pre", { tabindex: "0", "aria-label": "Program" });
  const draw = () => {
    const { method, request } = calls[Number(which.value)];
    const { requestId, ...given } = request; // a repeat with the same id would return the first answer
    show(text, LANGUAGES.find(([name]) => name === language.value)[2](method, given));
  };
  which.addEventListener("change", draw);
  language.addEventListener("change", draw);
  draw();
  return show(body, h("div", { class: "bar" }, h("label", { class: "field" }, h("span", null, "Call"), which), h("label", { class: "field" }, h("span", null, "Language"), language),
    action("Copy", async () => {
      if (navigator.clipboard) {
        await navigator.clipboard.writeText(text.textContent);
        return notify("Copied.");
      }
      getSelection().selectAllChildren(text);
      return notify("The browser lets no page copy over plain HTTP: the text is selected.");
    })), text);
}

const quoted = (text) => `'${text.replaceAll("'", String.raw`'\''`)}'`;
const BEARER = `-H "Authorization: Bearer $MEMSTREAM_TOKEN"`;

function toCurl(method, request) {
  const url = `${apiRoot()}memstream.v1.${method}`;
  if (!STREAMS.has(method)) {
    return `curl -sS ${quoted(url)} \\\n  ${BEARER} -H 'Content-Type: application/json' \\\n  -d ${quoted(JSON.stringify(request, null, 2))}`;
  }
  const body = JSON.stringify(request);
  const size = new TextEncoder().encode(body).length;
  const head = [0, size >>> 24, size >>> 16, size >>> 8, size].map((each) => `\\${(each & 255).toString(8).padStart(3, "0")}`).join("");
  return `# a message has five bytes before it: a flag and its size\n{ printf '${head}'; printf %s ${quoted(body)}; } |\n  curl -sSN ${quoted(url)} ${BEARER} \\\n    -H 'Content-Type: application/connect+json' --data-binary @-`;
}

/** The module of a service: MemoryService is in memory_service. */
const moduleOf = (service) => service.replace(/(?<=[a-z])(?=[A-Z])/g, "_").toLowerCase();
const lower = (name) => name[0].toLowerCase() + name.slice(1);
/** The gRPC port, which the page does not know; this is its usual number. */
const target = () => `${new URL(apiRoot()).hostname}:7700`;

function toPython(method, request) {
  const [service, name] = method.split("/");
  const module = moduleOf(service);
  const call = `stub.${name}(request, metadata=[("authorization", f"Bearer {os.environ.get('MEMSTREAM_TOKEN', '')}")])`;
  const use = STREAMS.has(method) ? `for message in ${call}:\n        print(MessageToJson(message))` : `print(MessageToJson(${call}))`;
  return `import os\n\nimport grpc\nfrom google.protobuf.json_format import MessageToJson, ParseDict\n\nfrom memstream.v1 import ${module}_pb2 as pb\nfrom memstream.v1 import ${module}_pb2_grpc as services\n\n`
    + `request = ParseDict(${pythonValue(request)}, pb.${name}Request())\n`
    + `with grpc.insecure_channel(os.environ.get("MEMSTREAM_TARGET", "${target()}")) as channel:\n    stub = services.${service}Stub(channel)\n    ${use}`;
}

function pythonValue(value, indent = "") {
  const inner = `${indent}    `;
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null || value === undefined) return "None";
  if (typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map((each) => pythonValue(each, inner)).join(", ")}]`;
  const pairs = Object.entries(value).filter(([, each]) => each !== undefined);
  if (!pairs.length) return "{}";
  return `{\n${pairs.map(([name, each]) => `${inner}${JSON.stringify(name)}: ${pythonValue(each, inner)},\n`).join("")}${indent}}`;
}

const CLIENT_OF = { BlockService: "blocks", ContextService: "contexts", MemoryService: "memories", ConversationService: "conversations", OperationService: "operations", ServerService: "server", StreamService: "streams" };

function toTypeScript(method, request) {
  const [service, name] = method.split("/");
  if (!CLIENT_OF[service]) return `// The TypeScript client does not have ${service}.`;
  const call = `client.${CLIENT_OF[service]}.${lower(name)}(request)`;
  const use = STREAMS.has(method) ? `for await (const message of ${call}) console.log(message);` : `console.log(await ${call});`;
  return `import { fromJson } from "@bufbuild/protobuf";\nimport { connect } from "@memstream/client";\nimport { ${name}RequestSchema } from "@memstream/client/v1/${moduleOf(service)}";\n\n`
    + `const client = connect(process.env.MEMSTREAM_TARGET ?? "${target()}", { token: process.env.MEMSTREAM_TOKEN });\n`
    + `const request = fromJson(${name}RequestSchema, ${JSON.stringify(request, null, 2)});\n${use}\nclient.close();`;
}
