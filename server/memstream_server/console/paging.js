// Pages of a list: the rows of one page are in the document, never all. The address names the page.

import { readAddress, remember } from "./address.js";
import { action, h, show } from "./dom.js";

export const PAGE_SIZE = 100;

/**
 * Shows page after page in `place`. `read(token)` returns { rows, next }, `draw(rows, found)` the nodes of a page, where
 * `found` is what was read; `size` is that of a full page.
 * Returns a function that shows the page of the address at first, and the first page when it is called again.
 */
export function paged(place, read, draw, size = PAGE_SIZE) {
  const body = h("div");
  const foot = h("nav", { class: "pages", "aria-label": "Pages" });
  show(place, body, foot);
  let asked = 0;

  /** Shows the page of the last token; those before it lead back. A page that cannot be read changes nothing. */
  async function open(tokens, moved) {
    asked += 1;
    const turn = asked;
    const found = await read(tokens.at(-1));
    if (turn !== asked) return; // another page was asked for meanwhile
    const { rows, next } = found;
    if (moved) remember({ page: tokens.length > 1 ? `${tokens.length}:${tokens.at(-1)}` : null }, { tokens });
    show(body, draw(rows, found));
    const back = action("Previous", () => open(tokens.at(-2) === null ? [""] : tokens.slice(0, -1), true));
    const forth = action("Next", () => open([...tokens, next], true));
    back.disabled = tokens.length === 1;
    forth.disabled = !next;
    const first = (tokens.length - 1) * size;
    const range = rows.length ? `${(first + 1).toLocaleString("en")} to ${(first + rows.length).toLocaleString("en")}` : "none";
    show(foot, back, h("span", null, range), forth);
  }

  let begun = false;
  return async () => {
    const tokens = begun ? [""] : tokensOfAddress();
    begun = true;
    try {
      await open(tokens, false);
    } catch (error) {
      if (error.reason !== "PAGE_TOKEN_INVALID" || tokens.length === 1) throw error;
      await open([""], true); // the link is of another list
    }
  };
}

/** The tokens up to the page of the address: a link has only that of its own page, and null for those before. */
function tokensOfAddress() {
  const [, number, token] = (readAddress().query.get("page") ?? "").match(/^(\d{1,6}):(.+)$/) ?? [];
  if (!token || Number(number) < 2) return [""];
  if (history.state?.tokens?.at(-1) === token) return history.state.tokens;
  return [...Array(Number(number) - 1).fill(null), token];
}
