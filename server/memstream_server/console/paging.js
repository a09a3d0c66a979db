// Pages of a list: the rows of one page are in the document, never all.

import { action, h, show } from "./dom.js";

export const PAGE_SIZE = 100;

/**
 * Shows page after page in `place`. `read(token)` returns { rows, next }, `draw(rows, found)` the nodes of a page, where
 * `found` is what was read; `size` is that of a full page.
 * Returns a function that shows the first page again.
 */
export function paged(place, read, draw, size = PAGE_SIZE) {
  const body = h("div");
  const foot = h("nav", { class: "pages", "aria-label": "Pages" });
  show(place, body, foot);
  let asked = 0;

  /** Shows the page of the last token; those before it lead back. A page that cannot be read changes nothing. */
  async function open(tokens) {
    asked += 1;
    const turn = asked;
    const found = await read(tokens.at(-1));
    if (turn !== asked) return; // another page was asked for meanwhile
    const { rows, next } = found;
    show(body, draw(rows, found));
    const back = action("Previous", () => open(tokens.slice(0, -1)));
    const forth = action("Next", () => open([...tokens, next]));
    back.disabled = tokens.length === 1;
    forth.disabled = !next;
    const first = (tokens.length - 1) * size;
    const range = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + rows.length).toLocaleString("en")}` : "none";
    show(foot, back, h("span", null, range), forth);
  }

  return () => open([""]);
}
