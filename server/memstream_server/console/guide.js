// What to do on a server without memories.

import { apiRoot } from "./api.js";
import { h } from "./dom.js";

/** The first steps, by hand and by program. */
export function beginnersGuide() {
  const url = apiRoot();
  const observe = `curl -sS ${url}memstream.v1.MemoryService/CreateMemory \\\n  -H 'Content-Type: application/json' -d '{"namespace": "demo", "memory": "joy"}'\n`
    + `curl -sS ${url}memstream.v1.StreamService/ObserveBatch \\\n  -H 'Content-Type: application/json' -d '{"namespace": "demo", "memory": "joy", "observations": [{"content": "Bob drinks green tea."}]}'\n`
    + `curl -sS ${url}memstream.v1.StreamService/RecallOnce \\\n  -H 'Content-Type: application/json' -d '{"namespace": "demo", "memory": "joy", "query": {"text": "What does Bob drink?"}}'`;
  const python = 'import memstream.sync\n\nwith memstream.sync.connect("127.0.0.1:7700") as client:\n    joy = client.create_memory("demo/joy", exist_ok=True)\n    joy.observe_batch(["Bob drinks green tea."])\n    print(joy.recall_once("What does Bob drink?")[0].fragment.content)';
  return h("section", { class: "guide" }, h("h2", null, "This server is empty. Three ways to begin"),
    h("ol", null,
      h("li", null, h("b", null, "Here: "), "create a memory above; its page has a form that adds fragments."),
      h("li", null, h("b", null, "With a sample: "), "end this server and start ", h("code", null, "memstream dev"), ", which has a memory of letters."),
      h("li", null, h("b", null, "With a program:"), h("pre", { tabindex: "0", "aria-label": "Python" }, python), h("pre", { tabindex: "0", "aria-label": "curl" }, observe))),
    h("p", { class: "quiet" }, "With authentication, a call has the header Authorization: Bearer KEY."));
}
