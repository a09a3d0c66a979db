// Reads times as people write them, as `memstream.read_time` does for the command line, MCP, JSON lines and programs.

import { h } from "./dom.js";

const FORMS = "a date (2026-05-08), a time (2026-05-08T12:00Z), now, today, yesterday, tomorrow, a duration before now (90m, 12h, 7d, 2w), or a Unix time";
const UNITS_MS = { s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000, w: 604_800_000 };
const DAYS = { today: 0, yesterday: -1, tomorrow: 1 };
const SECONDS_MAX = 1e11; // a larger Unix time counts milliseconds, then microseconds
const DATE = /^(\d{4})-?(\d\d)-?(\d\d)$/;
const TIME = /^(\d{4})-?(\d\d)-?(\d\d)[T ](\d\d):?(\d\d)(?::?(\d\d)(?:[.,](\d+))?)?(Z|[+-]\d\d(?::?\d\d)?)?$/;

/** A control for a time; `until` ends a range, so that a date includes its day. */
export function timeInput(name, until = false) {
  return h("input", { name, type: "text", autocomplete: "off", spellcheck: "false", placeholder: "2026-05-08, 7d, now", "data-time": until ? "until" : "from" });
}

/** The time of a control in the zone of its form, else of the browser, as RFC 3339; null if it is empty. Throws an Error. */
export function timeOf(control) {
  const text = control.value.trim();
  return text ? readTime(text, control.form?.elements.zone?.value.trim() ?? "", control.dataset.time === "until") : null;
}

/** The time as RFC 3339 in UTC. `zone`: of dates and of times without one, by its IANA name; empty: the browser's. */
export function readTime(text, zone = "", until = false, now = Date.now()) {
  let moment;
  try {
    moment = new Date(momentOf(text.trim(), zone, until, now)).toISOString();
    if (!/^(?!0000)\d{4}-/.test(moment)) throw new RangeError("a year that the contract has not");
  } catch (error) {
    throw new Error(error instanceof RangeError && /time ?zone/i.test(error.message) ? `${zone} is no time zone.` : `${text} is no time: give ${FORMS}.`);
  }
  return moment;
}

function momentOf(text, zone, until, now) {
  const [lower, upper] = [text.toLowerCase(), text.toUpperCase()];
  if (lower === "now") return now;
  const span = lower.match(/^(\d+(?:\.\d+)?)\s?([smhdw])$/);
  if (span) return now - Number(span[1]) * UNITS_MS[span[2]];
  if (/^-?\d{9,}(\.\d+)?$/.test(text)) return unix(Number(text));
  const whole = upper.match(DATE)?.slice(1).map(Number) ?? (lower in DAYS ? dayIn(zone, now, DAYS[lower]) : null);
  if (whole) return inZone([whole[0], whole[1], checked(whole) + Number(until), 0, 0, 0], zone);
  const found = upper.match(TIME);
  if (!found) return NaN;
  const [year, month, day, hour, minute, second = 0] = found.slice(1, 7).map((each) => Number(each ?? 0));
  checked([year, month, day]);
  const midnight = hour === 24 && minute === 0 && second === 0;
  if ((hour > 23 && !midnight) || minute > 59 || second > 60) return NaN;
  const ms = Math.trunc(1_000 * Number(`0.${found[7] ?? 0}`));
  const parts = [year, month, day, hour, minute, second];
  return ms + (found[8] ? Date.UTC(year, month - 1, day, hour, minute, second) - offsetOf(found[8]) : inZone(parts, zone));
}

/** The day of a date that exists, from the year 100 on. Throws a RangeError. */
function checked([year, month, day]) {
  const made = new Date(Date.UTC(year, month - 1, day));
  if (made.getUTCFullYear() !== year || made.getUTCMonth() !== month - 1 || made.getUTCDate() !== day) throw new RangeError("no such day");
  return day;
}

function unix(value) {
  for (const scale of [1_000, 1, 0.001]) if (Math.abs(value) < SECONDS_MAX * (1_000 / scale)) return value * scale;
  return NaN;
}

function offsetOf(text) {
  if (text === "Z") return 0;
  const [, sign, hours, minutes] = text.match(/^([+-])(\d\d):?(\d\d)?$/);
  return (sign === "-" ? -1 : 1) * (Number(hours) * 60 + Number(minutes ?? 0)) * 60_000;
}

/** Year, month and day in a zone. */
function dayIn(zone, now, days) {
  const [year, month, day] = wallOf(now, zone);
  const moved = new Date(Date.UTC(year, month - 1, day + days));
  return [moved.getUTCFullYear(), moved.getUTCMonth() + 1, moved.getUTCDate()];
}

/** What a clock in the zone shows. */
function wallOf(moment, zone) {
  const format = new Intl.DateTimeFormat("en-US", { ...(zone && { timeZone: zone }), hourCycle: "h23", year: "numeric", month: "numeric", day: "numeric", hour: "numeric", minute: "numeric", second: "numeric" });
  const parts = Object.fromEntries(format.formatToParts(moment).map(({ type, value }) => [type, Number(value)]));
  return [parts.year, parts.month, parts.day, parts.hour, parts.minute, parts.second];
}

/** The moment at which a clock in the zone shows these parts. */
function inZone([year, month, day, ...rest], zone) {
  const shown = Date.UTC(year, month - 1, day, ...rest);
  const offset = (moment) => {
    const [y, mo, ...others] = wallOf(moment, zone);
    return Date.UTC(y, mo - 1, ...others) - moment;
  };
  return shown - offset(shown - offset(shown));
}
