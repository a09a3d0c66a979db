// Elements from values. Text becomes text nodes: nothing here parses markup.

/** An element. `attributes`: `class`, attributes by name, and functions by event name (`onclick`). False and null are left out. */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

/** Appends nodes and texts; lists are flattened, null and false left out. */
export function append(element, children) {
  for (const child of [children].flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replaces the children of an element. */
export function show(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

// Characters that reorder or hide the text around them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g;

/** The text with embedding, override and control characters written as ⟨U+202E⟩. */
export function visible(text) {
  return String(text ?? "").replace(
    HIDDEN,
    (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

/** A text of a client, isolated from the direction of what surrounds it. */
export function given(text, kind = "given") {
  return h("bdi", { class: kind, dir: "auto" }, visible(text));
}

/** A text of a client that is cut after `limit` characters, with a button that shows the rest. */
export function clipped(text, limit = 400) {
  const shown = h("bdi", { class: "content", dir: "auto" });
  if (text.length <= limit) return append(shown, visible(text));
  const button = h("button", { type: "button", class: "link", "aria-expanded": "false" });
  const label = () => {
    const open = button.getAttribute("aria-expanded") === "true";
    show(shown, visible(open ? text : `${cut(text, limit)}…`));
    show(button, open ? "show less" : `show all ${text.length.toLocaleString("en")} characters`);
  };
  button.addEventListener("click", () => {
    button.setAttribute("aria-expanded", String(button.getAttribute("aria-expanded") !== "true"));
    label();
  });
  label();
  return [shown, " ", button];
}

/** The first `limit` characters; a surrogate pair is not split. */
export function cut(text, limit) {
  const last = text.charCodeAt(limit - 1);
  return text.slice(0, last >= 0xd800 && last <= 0xdbff ? limit - 1 : limit);
}

/** A labelled control. */
export function field(label, control, hint) {
  return h("label", { class: "field" }, h("span", null, label), control, hint && h("small", null, hint));
}

/** A select. `options`: [value, label] pairs. */
export function select(name, options, chosen = "") {
  const made = h("select", { name }, options.map(([value, label]) => h("option", { value }, label)));
  made.value = chosen;
  return made;
}

/** A table with a caption for screen readers. `heads`: labels, or [label, class]. */
export function table(caption, heads, body, kind = "") {
  const cells = heads.map((head) => {
    const [label, cls] = [head].flat();
    return h("th", { scope: "col", class: cls }, label);
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: kind }, h("caption", { class: "away" }, caption), h("thead", null, h("tr", null, cells)), body));
}

/** A list of terms and descriptions; pairs without a value are left out. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([term, value]) => [h("dt", null, term), h("dd", null, value)]));
}

/** Shows a message for screen readers and at the top of the page; empty clears it. */
export function notify(text, kind = "info") {
  const place = document.getElementById("notice");
  place.className = text ? kind : "";
  show(place, text && h("p", null, visible(text)),
    text && h("button", { type: "button", class: "link", onclick: () => notify("") }, "dismiss"));
}

/** A button that is disabled while its action runs; an error becomes a notice. */
export function action(label, run, kind = "") {
  const button = h("button", { type: "button", class: kind }, label);
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await run();
    } catch (error) {
      notify(error.message, "bad");
    } finally {
      button.disabled = false;
    }
  });
  return button;
}
