/**
 * Names of users' memories, a reversible mapping that is the same in all languages. An id of letters, digits, "-", "_"
 * and "." that begins with a letter or a digit is its own name; in others each other byte of UTF-8 is escaped: "bob@home"
 * is u~bob~40home. If that is too long, the name is "b~" and the UTF-8 in URL-safe base64.
 */
import { invalidField } from "./errors.js";

const NAME_MAX = 128;
const ID_BYTES_MAX = Math.floor(((NAME_MAX - 2) * 3) / 4);
const PLAIN = /^[A-Za-z0-9][A-Za-z0-9._-]*$/;
const UNESCAPED = /[A-Za-z0-9._-]/;

/**
 * Returns the name of a user's memory; `userIdOf` is the inverse. Throws MemstreamError for an empty id, for one with
 * half a surrogate pair, and for one that does not fit into 128 characters: 94 bytes of UTF-8 always fit.
 */
export function memoryName(userId: string): string {
  if (userId === "") throw invalidField("userId", "is empty");
  if (userId.length <= NAME_MAX && PLAIN.test(userId)) return userId;
  const bytes = Buffer.from(userId, "utf8");
  if (bytes.toString("utf8") !== userId) throw invalidField("userId", "has half a surrogate pair");
  const escaped = Array.from(bytes, (byte) => {
    const letter = String.fromCharCode(byte);
    return UNESCAPED.test(letter) ? letter : `~${byte.toString(16).padStart(2, "0")}`;
  });
  const readable = `u~${escaped.join("")}`;
  if (readable.length <= NAME_MAX) return readable;
  const packed = `b~${bytes.toString("base64url")}`;
  if (packed.length <= NAME_MAX) return packed;
  const advice = "shorten it, or name the memory by a hash of it and store the id in a label";
  throw invalidField("userId", `has ${bytes.length} bytes of UTF-8, but a name holds ${ID_BYTES_MAX}: ${advice}`);
}

/** Returns the user id of a name that `memoryName` returned. Throws MemstreamError for any other name. */
export function userIdOf(name: string): string {
  const userId = decode(name);
  if (userId === "" || encode(userId) !== name) {
    throw invalidField("name", `is ${JSON.stringify(name)}, which memoryName did not make`);
  }
  return userId;
}

function encode(userId: string): string {
  try {
    return memoryName(userId);
  } catch {
    return "";
  }
}

function decode(name: string): string {
  if (name.startsWith("b~")) return Buffer.from(name.slice(2), "base64url").toString("utf8");
  if (!name.startsWith("u~")) return name;
  const bytes = name.slice(2).replace(/~([0-9a-f]{2})/g, (_, hex: string) => String.fromCharCode(parseInt(hex, 16)));
  return Buffer.from(bytes, "latin1").toString("utf8");
}
