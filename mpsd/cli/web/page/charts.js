/* The charts of one key of the history, and its means of each hour as a table. */

import { draw, make } from "./dom.js";
import { clock, percent, size } from "./words.js";

const HOUR = 3600000;
const HEIGHT = 100;

/** Return the axis of time of the charts. */
export function axisOf(found) {
  return make("div", { class: "axis", "aria-hidden": "true" }, make("span", {}, clock(found.since)), make("span", {}, clock(found.until)));
}

/** Draw granted parts of the height as an area and held ones as a line; the width of a sample is its length in time. */
export function course(series, found, label, granted, held) {
  const begin = Date.parse(found.since);
  const width = Date.parse(found.until) - begin;
  const at = (time) => (100 * (time - begin)) / width;
  const down = (part) => (HEIGHT * (1 - part)).toFixed(2);
  const picture = draw("svg", { class: "course", viewBox: `0 0 100 ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${label}; the numbers follow` });
  const spans = series.samples.map((each) => {
    const from = Math.max(at(Date.parse(each.time)), 0);
    return { each, from: from.toFixed(3), to: Math.min(from + (100000 * each.seconds) / width, 100).toFixed(3) };
  });
  const area = spans.map(({ each, from, to }) => `M${from} ${HEIGHT}V${down(granted(each))}H${to}V${HEIGHT}Z`);
  picture.append(draw("path", { class: "granted", d: area.join("") }));
  if (held !== null) {
    const line = spans.filter(({ each }) => held(each) !== null).map(({ each, from, to }) => `M${from} ${down(held(each))}H${to}`);
    picture.append(draw("path", { class: "held", d: line.join("") }));
  }
  for (const gap of found.gaps) {
    const [from, to] = [Math.max(at(Date.parse(gap.since)), 0), Math.min(at(Date.parse(gap.until)), 100)];
    if (to > from) picture.append(draw("rect", { class: "gap", x: from, y: 0, width: to - from, height: HEIGHT }));
  }
  return picture;
}

/** Make a table with the means of each hour. */
export function hourTable(name, series) {
  const hours = new Map();
  for (const each of series.samples) {
    const hour = Math.floor(Date.parse(each.time) / HOUR) * HOUR;
    const sums = hours.get(hour) ?? { threads: 0, memory: 0, held: 0, isKnown: false };
    sums.threads += (each.threads_granted * each.seconds) / 3600;
    sums.memory += (each.memory_granted * each.seconds) / 3600;
    sums.held += ((each.memory_held ?? 0) * each.seconds) / 3600;
    sums.isKnown ||= each.memory_held !== null;
    hours.set(hour, sums);
  }
  const heading = (text) => make("th", { role: "columnheader", scope: "col" }, text);
  const cell = (text) => make("td", { role: "cell", class: "number" }, text);
  const rows = [...hours].map(([hour, sums]) => make(
    "tr", { role: "row" },
    cell(clock(hour).slice(5, 16)), cell(percent(Number(sums.threads.toFixed(1)))),
    cell(size(sums.memory)), cell(sums.isKnown ? size(sums.held) : "-"),
  ));
  return make(
    "table", { role: "table" },
    make("caption", { class: "unseen" }, `${name}: means of each hour of the last day`),
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...["Hour", "Threads", "Memory", "In use"].map(heading))),
    make("tbody", { role: "rowgroup" }, ...rows),
  );
}
