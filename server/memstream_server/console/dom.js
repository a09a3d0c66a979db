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

// Characters that nobody sees: Unicode's default-ignorable ones and controls. The server marks fragments by the same
// rules (core/printable.py): what belongs to a shown sign is not hidden.
const JOINING = "\\u0600-\\u07ff\\u0860-\\u109f\\u1780-\\u18af\\u1900-\\u1cff\\ua800-\\uaaff\\ufb50-\\ufdff\\ufe70-\\ufefc";
const SIGN = "#*0-9\\xa9\\xae\\u203c-\\u3299\\u{1f000}-\\u{1faff}";
const HAN = "\\u3400-\\u9fff\\uf900-\\ufaff\\u{20000}-\\u{323af}";
const tags = (region) => `${Array.from(region, (letter) => `\\u{${(0xe0000 + letter.codePointAt(0)).toString(16)}}`).join("")}\\u{e007f}`;
const SHOWN = [
  `(?<=[${JOINING}])[\\u200c\\u200d](?=[${JOINING}])`,
  `(?<=[${SIGN}\\ufe0f])\\u200d(?=[${SIGN}])`,
  `(?<=[${SIGN}${HAN}])[\\ufe00-\\ufe0f]`,
  `(?<=[${HAN}])[\\u{e0100}-\\u{e01ef}]`,
  "(?<=[\\u1820-\\u18aa])[\\u180b-\\u180d\\u180f]",
  `(?<=\\u{1f3f4})(?:${["gbeng", "gbsct", "gbwls"].map(tags).join("|")})`,
].join("|");
const HIDDEN = new RegExp(`(${SHOWN})|([\\u{e0020}-\\u{e007e}]+)|[\\0-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f]|\\p{Default_Ignorable_Code_Point}`, "gu");

/** The text with characters that nobody sees written as ⟨U+202E⟩, and tag characters as what they say. */
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, (found, shown, tagged) => {
    if (shown !== undefined) return found;
    if (tagged !== undefined) return `⟨tags: ${Array.from(tagged, (tag) => String.fromCodePoint(tag.codePointAt(0) - 0xe0000)).join("")}⟩`;
    return `⟨U+${found.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** The mark of a fragment whose texts have characters that nobody sees; null without. */
export function hiddenMark({ hiddenCharacters = [] }) {
  if (!hiddenCharacters.length) return null;
  return h("span", { class: "mark bad", title: `characters that nobody sees: ${hiddenCharacters.join(", ")}` }, "hidden text");
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
  made.dataset.default = chosen;
  return made;
}

const OWN_LAYOUT = new Set(["steps", "fragments", "policy"]); // on a narrow screen, in style.css

/** Lets a narrow screen show each cell after the label of its column: a row becomes a paragraph. */
export function labelCells(made, labels) {
  made.classList.add("rows");
  labels.forEach((label, at) => {
    if (typeof label === "string") made.style.setProperty(`--head-${at + 1}`, JSON.stringify(`${label} `));
  });
  return made;
}

/** A table with a caption for screen readers. `heads`: labels, or [label, class]. */
export function table(caption, heads, body, kind = "") {
  const cells = heads.map((head) => {
    const [label, cls] = [head].flat();
    return h("th", { scope: "col", class: cls }, label);
  });
  const made = h("table", { class: kind }, h("caption", { class: "away" }, caption), h("thead", null, h("tr", null, cells)), body);
  if (!OWN_LAYOUT.has(kind)) labelCells(made, heads.map((head) => [head].flat()[0]));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made);
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

/** Saves parts, texts or bytes, as a file. */
export function download(name, parts, type = "application/x-ndjson") {
  const url = URL.createObjectURL(new Blob(parts, { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** A dialog that asks before something that cannot be undone; `word` must be typed. Resolves to whether it was. */
export function confirmed(question, word) {
  const input = h("input", { type: "text", autocomplete: "off", spellcheck: "false", "aria-label": `Type ${word}` });
  const go = h("button", { type: "submit", class: "danger", disabled: true }, "Go on");
  const dialog = h("dialog", null, h("form", { method: "dialog" }, h("p", null, question), h("p", null, "Type ", h("b", null, visible(word)), " to go on."), input,
    h("div", { class: "bar" }, go, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  input.addEventListener("input", () => { go.disabled = input.value !== word; });
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      resolve(input.value === word && !go.disabled && dialog.returnValue === "yes");
      dialog.remove();
    });
    go.value = "yes";
  });
}
