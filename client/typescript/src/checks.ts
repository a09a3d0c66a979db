/** Checks of arguments at run time: JavaScript has no types, and TypeScript's end where a value is `any`. */
import { create, isMessage, ScalarType } from "@bufbuild/protobuf";
import type { DescField, DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";

import { invalidField } from "./errors.js";

/** Throws MemstreamError unless `given` is an object with no other keys than `known`, which has all keys of its type. */
export function checkOptions<Options extends object>(
  where: string,
  given: Options,
  known: Readonly<Record<keyof Options, true>>,
): void {
  checkKeys(where, given, Object.keys(known));
}

/** Returns the message; throws MemstreamError for an unknown field or a value of another type. */
export function checkedMessage<Desc extends DescMessage>(
  where: string,
  desc: Desc,
  init: MessageInitShape<Desc>,
): MessageShape<Desc> {
  checkFields(where, desc, init);
  return create(desc, init);
}

function checkFields(where: string, desc: DescMessage, init: unknown): void {
  if (isMessage(init)) {
    if (init.$typeName !== desc.typeName) throw invalidField(where, `is a ${init.$typeName}, not a ${desc.typeName}`);
    return;
  }
  const single = desc.fields.filter((field) => field.oneof === undefined);
  const given = checkKeys(where, init, [...single, ...desc.oneofs].map((each) => each.localName));
  for (const field of single) checkField(`${where}.${field.localName}`, field, given[field.localName]);
  for (const oneof of desc.oneofs) {
    const chosen = given[oneof.localName];
    if (chosen === undefined) continue;
    const { case: name, value } = checkKeys(`${where}.${oneof.localName}`, chosen, ["case", "value"]);
    if (name === undefined) continue;
    const field = oneof.fields.find((each) => each.localName === name);
    if (!field) {
      const known = oneof.fields.map((each) => each.localName).join(", ");
      throw invalidField(`${where}.${oneof.localName}.case`, `is ${show(name)}: one of ${known} is wanted`);
    }
    checkField(`${where}.${oneof.localName}.value`, field, value);
  }
}

function checkKeys(where: string, given: unknown, known: readonly string[]): Record<string, unknown> {
  if (typeof given !== "object" || given === null || Array.isArray(given)) {
    throw invalidField(where, `is ${show(given)}, an object is wanted`);
  }
  for (const key of Object.keys(given)) {
    if (known.includes(key) || key.startsWith("$")) continue;
    throw invalidField(`${where}.${key}`, `is unknown: ${known.length > 0 ? known.join(", ") : "nothing"} can be given`);
  }
  return given as Record<string, unknown>;
}

function checkField(where: string, field: DescField, value: unknown): void {
  if (value === undefined) return;
  switch (field.fieldKind) {
    case "list":
      if (!Array.isArray(value) && !ArrayBuffer.isView(value)) throw invalidField(where, `is ${show(value)}, an array is wanted`);
      Array.from(value as ArrayLike<unknown>).forEach((each, place) => {
        checkValue(`${where}[${place}]`, field, each);
      });
      return;
    case "map":
      if (typeof value !== "object" || value === null || Array.isArray(value)) {
        throw invalidField(where, `is ${show(value)}, an object is wanted`);
      }
      for (const [key, each] of Object.entries(value)) checkValue(`${where}.${key}`, field, each);
      return;
    default:
      checkValue(where, field, value);
  }
}

function checkValue(where: string, field: DescField, value: unknown): void {
  if (field.message) {
    // JSON in a message: any object, array or scalar.
    if (!field.message.typeName.startsWith("google.protobuf.")) checkFields(where, field.message, value);
    return;
  }
  const wanted = field.enum ? "number" : typeOfScalar(field.scalar);
  const found = value instanceof Uint8Array ? "Uint8Array" : typeof value;
  if (found !== wanted) throw invalidField(where, `is ${show(value)}, a ${wanted} is wanted`);
}

function typeOfScalar(scalar: ScalarType | undefined): string {
  switch (scalar) {
    case ScalarType.STRING:
      return "string";
    case ScalarType.BOOL:
      return "boolean";
    case ScalarType.BYTES:
      return "Uint8Array";
    case ScalarType.INT64:
    case ScalarType.UINT64:
    case ScalarType.SINT64:
    case ScalarType.FIXED64:
    case ScalarType.SFIXED64:
      return "bigint";
    default:
      return "number";
  }
}

function show(value: unknown): string {
  if (typeof value === "string") return JSON.stringify(value.length > 40 ? `${value.slice(0, 40)}...` : value);
  if (typeof value === "object" && value !== null) return Array.isArray(value) ? "an array" : "an object";
  return typeof value === "function" ? "a function" : String(value);
}
