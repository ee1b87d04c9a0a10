/* The last day: the granted and held amounts of each GPU, as a chart and as numbers for each hour. */

import { bringTexts, byId, draw, make, say } from "./dom.js";
import { clock, hours, percent, plural, size } from "./words.js";
import { ask, explained } from "./server.js";

const DAY = 86400;
const HOUR = 3600000;
const HEIGHT = 100;
const GIB = 1024 ** 3;

/** Read the history and show it. An mpsd without a history is not an error. */
export async function readHistory(gpus) {
  let found;
  try {
    found = await ask("GET", `/v1/history?by=gpu&since=${DAY}`);
  } catch (error) {
    const isOld = error.status === 404;
    say(byId("history-note"), isOld ? "this mpsd keeps no history" : explained(error));
    if (isOld) byId("history-list").replaceChildren();
    return;
  }
  const gaps = found.gaps.map((each) => `${clock(each.since)} to ${clock(each.until)}: ${each.because}`);
  say(byId("history-note"), [found.because, ...gaps].filter((each) => each).join("; "));
  const named = new Map(gpus.map((gpu) => [gpu.uuid, gpu]));
  byId("history-list").replaceChildren(...found.history.map((series) => cardOf(series, named.get(series.key), found)));
  if (found.history.length === 0 && !byId("history-note").textContent) say(byId("history-note"), "nothing was granted");
}

function cardOf(series, gpu, found) {
  const name = gpu === undefined ? series.key ?? "unknown" : `GPU ${gpu.index}`;
  const most = Math.max(gpu?.memory_total ?? 0, ...series.samples.map((each) => Math.max(each.memory_granted, each.memory_held ?? 0)), 1);
  const threads = Math.max(100, ...series.samples.map((each) => each.threads_granted));
  const facts = make("ul", { class: "legend" });
  bringTexts(facts, factsOf(series.total));
  return make(
    "article", { class: "card" },
    make("h3", {}, name),
    make("p", { class: "soft" }, "Threads granted"),
    course(series, found, `${name}: threads granted`, (each) => each.threads_granted / threads, null),
    make("p", { class: "soft" }, "Memory granted, and in use as a line"),
    course(series, found, `${name}: memory granted and in use`, (each) => each.memory_granted / most,
      (each) => (each.memory_held === null ? null : each.memory_held / most)),
    make("div", { class: "axis", "aria-hidden": "true" }, make("span", {}, clock(found.since)), make("span", {}, clock(found.until))),
    facts,
    make("details", {}, make("summary", {}, `Numbers of ${name}, for each hour`), tableOf(name, series)),
  );
}

/** The totals that were granted and held, in the units of `mpsctl usage`. */
function factsOf(total) {
  return [
    `${hours(total.threads_granted / 100)} GPU hours granted`,
    `${hours(total.memory_granted / GIB)} GiB hours granted`,
    total.memory_held === null ? "in use: unknown" : `${hours(total.memory_held / GIB)} GiB hours in use`,
    plural(total.leases, "lease"),
  ];
}

/** Draw the granted amounts as an area and the held ones as a line; the width of a sample is its length in time. */
function course(series, found, label, granted, held) {
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

function tableOf(name, series) {
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
