// Pages of a list: the rows of one page are in the document, never all.

import { action, h, show } from "./dom.js";

export const PAGE_SIZE = 100;

/**
 * Shows page after page in `place`. `read(token)` returns { rows, next }, `draw(rows)` the nodes of a page.
 * Returns a function that shows the first page again.
 */
export function paged(place, read, draw) {
  const tokens = [""];
  const body = h("div");
  const foot = h("nav", { class: "pages", "aria-label": "Pages" });
  show(place, body, foot);

  async function open() {
    const { rows, next } = await read(tokens[tokens.length - 1]);
    show(body, draw(rows));
    const back = action("Previous", () => { tokens.pop(); return open(); });
    const forth = action("Next", () => { tokens.push(next); return open(); });
    back.disabled = tokens.length === 1;
    forth.disabled = !next;
    const first = (tokens.length - 1) * PAGE_SIZE;
    const range = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + rows.length).toLocaleString("en")}` : "none";
    show(foot, back, h("span", null, range), forth);
  }

  return async () => {
    tokens.length = 1;
    await open();
  };
}
