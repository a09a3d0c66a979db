// Texts of fragments that are named by id alone: they are read afterwards.

import { call } from "./api.js";
import { clipped, h, show } from "./dom.js";
import { textOf } from "./format.js";

/** The text of a fragment; the element is empty until it is read. */
export function textLater(memory, id, signal, limit = 160) {
  const place = h("span");
  call("MemoryService/GetFragment", { ...memory, id }, signal)
    .then(({ fragment }) => show(place, clipped(textOf(fragment), limit)))
    .catch((error) => show(place, h("span", { class: "quiet" }, error.code === "not_found" ? "gone or forgotten" : error.message)));
  return place;
}

/** Reads fragments by id. Returns a Map of id to fragment; those that are gone or forgotten are absent. */
export async function readFragments(memory, ids, signal) {
  const read = async (id) => {
    try {
      return [id, (await call("MemoryService/GetFragment", { ...memory, id }, signal)).fragment];
    } catch (error) {
      if (error.code !== "not_found") throw error;
      return [id, undefined];
    }
  };
  const found = await Promise.all([...new Set(ids)].map(read));
  return new Map(found.filter(([, fragment]) => fragment));
}
