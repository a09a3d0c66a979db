// Values of the contract as text.

/** A number with thousands separators; 64-bit integers arrive as text. */
export function count(value) {
  return Number(value ?? 0).toLocaleString("en");
}

/** A number with three decimals, and a minus sign as wide as a plus sign. */
export function decimal(value, digits = 3) {
  return Number(value ?? 0).toFixed(digits).replace("-", "−");
}

/** Bytes with a unit. */
export function bytes(value) {
  let size = Number(value ?? 0);
  for (const unit of ["B", "KB", "MB"]) {
    if (size < 1024) return `${size < 10 && unit !== "B" ? size.toFixed(1) : Math.round(size)} ${unit}`;
    size /= 1024;
  }
  return `${size.toFixed(1)} GB`;
}

/** The name of an enum's value without its prefix: TIER_SHORT_TERM is "short-term". */
export function enumName(value, prefix) {
  return (value ?? "").replace(prefix, "").toLowerCase().replaceAll("_", "-");
}

export const tierName = (tier) => enumName(tier, "TIER_");

/** A time of the contract in the zone of the browser, to the second; a whole one is in the attribute. */
export function time(value, withDate = true) {
  const element = document.createElement("time");
  if (!value) return element;
  const moment = new Date(value);
  const pad = (number) => String(number).padStart(2, "0");
  const clock = [moment.getHours(), moment.getMinutes(), moment.getSeconds()].map(pad).join(":");
  const date = [moment.getFullYear(), pad(moment.getMonth() + 1), pad(moment.getDate())].join("-");
  element.setAttribute("datetime", value);
  element.setAttribute("title", value);
  element.textContent = withDate ? `${date} ${clock}` : clock;
  return element;
}

/** A time in a zone by its IANA name; in the browser's if the browser does not know it. */
export function timeIn(value, zone) {
  const element = time(value);
  try {
    // This locale writes a date as the other times here are written.
    element.textContent = new Date(value).toLocaleString("sv-SE", { timeZone: zone || "UTC" });
  } catch {
    // The name is unknown to the browser.
  }
  return element;
}

/** A short form of a fragment's id: its random part. */
export const shortId = (id) => (id ?? "").slice(-8);

/** The text of a fragment: its content, or the set parts of a structured one. */
export function textOf(fragment) {
  if (fragment.structured === undefined) return fragment.content ?? "";
  return Object.entries(fragment.structured).map(([name, value]) => `${name}: ${value}`).join("\n");
}

/** A value of a fragment's metadata. */
export function metadataValue(value) {
  if (value.listValue || value.mapValue) return JSON.stringify(plainValue(value));
  return String("nullValue" in value ? null : value.stringValue ?? value.intValue ?? value.doubleValue ?? value.boolValue ?? "");
}

/** A value of metadata as JSON has it. */
function plainValue(value) {
  if (value.listValue) return (value.listValue.values ?? []).map(plainValue);
  if (value.mapValue) return Object.fromEntries(Object.entries(value.mapValue.entries ?? {}).map(([name, each]) => [name, plainValue(each)]));
  return value.stringValue ?? (value.intValue === undefined ? undefined : Number(value.intValue)) ?? value.doubleValue ?? value.boolValue ?? null;
}

/** The path of a page; every part is escaped. */
export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;
