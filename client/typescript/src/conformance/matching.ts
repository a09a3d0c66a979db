/** Compares an answer with what a case expects; tests/conformance/matching.py has the rules. */
import type { JsonValue } from "@bufbuild/protobuf";

export type Json = JsonValue;
export type JsonObject = Record<string, JsonValue>;

export function isObject(value: Json | undefined): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

export function textOf(value: Json | undefined): string {
  return typeof value === "string" ? value : JSON.stringify(value ?? null);
}

/** Replaces each `${name}` in a value by the kept text. */
export function fillPlaceholders(value: Json, kept: ReadonlyMap<string, string>): Json {
  if (typeof value === "string") return value.replace(/\$\{(\w+)\}/g, (_, name: string) => kept.get(name) ?? "");
  if (Array.isArray(value)) return value.map((each) => fillPlaceholders(each, kept));
  if (!isObject(value)) return value;
  if (typeof value["repeat"] === "string") return value["repeat"].repeat(Number(value["times"]));
  return Object.fromEntries(
    Object.entries(value).map(([key, each]) => [fillPlaceholders(key, kept) as string, fillPlaceholders(each, kept)]),
  );
}

/** Describes how an answer differs from the expected one; empty if it does not. */
export function compareValues(expected: Json, actual: Json | undefined, where: string): string {
  const got = JSON.stringify(actual) as string | undefined;
  if (isObject(expected)) {
    if (typeof expected["min"] === "number" && Object.keys(expected).length === 1) {
      return Number(actual) >= expected["min"] ? "" : `${where} is ${got ?? "absent"}`;
    }
    if (!isObject(actual)) return `${where} is ${got ?? "absent"}`;
    return first(Object.entries(expected).map(([key, each]) => compareValues(each, actual[key], `${where}.${key}`)));
  }
  if (Array.isArray(expected)) {
    const items = Array.isArray(actual) ? actual : [];
    if (items.length !== expected.length) return `${where} has ${items.length} items: ${got ?? "absent"}`;
    return first(expected.map((each, place) => compareValues(each, items[place], `${where}[${place}]`)));
  }
  return expected === (actual ?? null) ? "" : `${where} is ${got ?? "absent"}, expected ${JSON.stringify(expected)}`;
}

function first(found: readonly string[]): string {
  return found.find((one) => one !== "") ?? "";
}

/** Whether two values are equal, except for the order of keys. */
export function same(one: Json | undefined, other: Json | undefined): boolean {
  if (isObject(one) && isObject(other)) {
    const keys = Object.keys(one);
    return keys.length === Object.keys(other).length && keys.every((key) => same(one[key], other[key]));
  }
  if (Array.isArray(one) && Array.isArray(other)) {
    return one.length === other.length && one.every((each, place) => same(each, other[place]));
  }
  return one === other;
}

/** Returns the value at a dotted path of an answer. */
export function valueAt(actual: Json | undefined, path: string): string {
  const inside = (at: Json | undefined, part: string): Json | undefined => {
    if (Array.isArray(at)) return at[Number(part)];
    return isObject(at) ? at[part] : undefined;
  };
  return textOf(path.split(".").reduce(inside, actual));
}
