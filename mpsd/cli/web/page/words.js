/* Figures as mpsctl prints them (mpsd/cli/render.py); tests/cli/web compares the two. */

const UNITS = [["TiB", 1024 ** 4], ["GiB", 1024 ** 3], ["MiB", 1024 ** 2], ["KiB", 1024]];
const SPANS = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];

/** Bytes as `8GiB`, rounded down to two decimals. */
export function size(bytes) {
  for (const [unit, factor] of UNITS) {
    if (bytes >= factor) return `${Math.floor((bytes * 100) / factor) / 100}${unit}`;
  }
  return `${Math.floor(bytes)}B`;
}

/** A percentage as `25%`. */
export const percent = (value) => `${Number(value.toPrecision(6))}%`;

/** An amount times seconds, as the amount times hours. */
export function hours(seconds) {
  const found = seconds / 3600;
  return found.toFixed(found >= 1 || found === 0 ? 2 : 4);
}

/** A number with its noun. */
export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

/** Seconds in two units, rounded down: `12s`, `1h 58m`, `9d`. */
export function span(exactly) {
  const seconds = Math.max(Math.floor(exactly), 0);
  const number = SPANS.findIndex(([, factor]) => seconds >= factor);
  if (number < 0) return "0s";
  const [[unit, factor], [below, part]] = [SPANS[number], SPANS[number + 1] ?? ["", 1]];
  const rest = below ? Math.floor((seconds % factor) / part) : 0;
  return `${Math.floor(seconds / factor)}${unit}${rest ? ` ${rest}${below}` : ""}`;
}

/** The span from one time of the API to a later one. */
export const age = (then, now) => span((Date.parse(now) - Date.parse(then)) / 1000);

/** The span from now to a future time of the API. */
export const until = (then, now) => age(now, then);

let ahead = 0;

/** Set the offset of displayed times from UTC (s) to the node's, so that they read as in mpsctl there. */
export function setClock(seconds) {
  ahead = seconds;
}

/** A time of the API on the node's clock. */
export function clock(at) {
  const time = new Date(new Date(at).getTime() + ahead * 1000);
  return time.toISOString().slice(0, 19).replace("T", " ");
}
