// Who uses the page, and what that caller may do.

import { askRights, hasKey, setKey } from "./api.js";

const KEPT_MS = 30_000;
let principal = "";
let rights = new Map(); // namespace -> { at, verbs: Promise<Set> }

/** The caller, for instance "key:joy"; empty if the server has no authentication. */
export const caller = () => principal;

/** Whether the page has a key that can be forgotten. */
export const signedIn = () => hasKey();

/** Asks the server who calls. Throws CallError with the code "unauthenticated" if a key is needed. */
export async function begin() {
  rights = new Map();
  principal = (await askRights("")).principal;
}

/**
 * Uses a key from now on; `keep`: a reload of the tab keeps it. Throws CallError and forgets the key if the server
 * refuses it.
 */
export async function signIn(key, keep) {
  setKey(key, keep);
  try {
    await begin();
  } catch (error) {
    signOut();
    throw error;
  }
}

/** Forgets the key. */
export function signOut() {
  setKey("");
  principal = "";
  rights = new Map();
}

/** The verbs that the caller has in a namespace, as a Set; asked again after half a minute. */
export function rightsIn(namespace) {
  const kept = rights.get(namespace);
  if (kept && performance.now() - kept.at < KEPT_MS) return kept.verbs;
  const verbs = askRights(namespace).then((answer) => new Set(answer.rights));
  if (rights.size > 200) rights.clear();
  rights.set(namespace, { at: performance.now(), verbs });
  verbs.catch(() => rights.delete(namespace));
  return verbs;
}
