/* The last day by GPU, user, name, lease or label: totals as `mpsctl usage --by` prints them, and charts. */

import { announce } from "./actions.js";
import { axisOf, course, hourTable } from "./charts.js";
import { bring, byId, make, say } from "./dom.js";
import { ask, explained } from "./server.js";
import { clock, hours, percent, plural, size } from "./words.js";

const GIB = 1024 ** 3;
const LABEL = "label:";
const MOST_CHARTS = 12; // all GPUs have charts, and this many of the other keys, of which there may be a thousand
const HEADINGS = { gpu: "GPU", user: "User", name: "Name", lease: "Lease" };
const OTHERS = { user: "other users", lease: "unknown" };

/** The columns of the totals: heading, and text of a total. */
const COLUMNS = [
  ["Leases", (total) => `${total.leases}`],
  ["GPU hours", (total) => hours(total.threads_granted / 100)],
  ["GiB hours", (total) => hours(total.memory_granted / GIB)],
  ["Held GiB hours", (total) => (total.memory_held === null ? "-" : hours(total.memory_held / GIB))],
  ["Held", (total) => (total.memory_held === null || !total.memory_granted ? "-" : `${((100 * total.memory_held) / total.memory_granted).toFixed(0)}%`)],
  ["Client hours", (total) => hours(total.clients)],
];

let asked = 0;

/** Connect the choice of the grouping with `view.by`: `gpu`, `user`, `name`, `lease` or `label:KEY`. */
export function prepareHistory(view, change) {
  const choose = () => {
    const kind = byId("history-by").value;
    view.by = kind === LABEL ? `${LABEL}${byId("history-label").value.trim()}` : kind;
    showGrouping(view);
    change();
  };
  byId("history-by").addEventListener("change", choose);
  byId("history-label").addEventListener("change", choose);
}

/** Show the grouping of a view in its controls. */
export function showGrouping(view) {
  const isLabel = view.by.startsWith(LABEL);
  byId("history-by").value = isLabel ? LABEL : view.by;
  byId("history-label-field").hidden = !isLabel;
  if (isLabel) byId("history-label").value = view.by.slice(LABEL.length);
}

/** Offer the labels of the leases in the field for a label. */
export function showLabels(leases) {
  const keys = [...new Set(leases.flatMap((lease) => Object.keys(lease.labels)))].sort();
  bring(byId("history-labels"), keys, (key) => key, (key) => make("option", { value: key }));
}

/** Read the history and show it. A user who has chosen this grouping hears of it. */
export async function readHistory(gpus, by, isChosen = false) {
  asked += 1;
  const number = asked;
  const { found, refusal, isPassing } = await request(by);
  if (number !== asked) return; // another grouping was chosen meanwhile
  if (found === undefined && (isChosen || !isPassing)) clear();
  const note = found === undefined ? refusal : show(found, gpus);
  say(byId("history-note"), note);
  if (isChosen) announce(found === undefined ? note : `the last day by ${headingOf(by)}: ${plural(found.history.length, "row")}`);
}

async function request(by) {
  if (by === LABEL) return { refusal: "enter the key of a label, such as team" };
  try {
    return { found: await ask("GET", `/page/history?by=${encodeURIComponent(by)}`) };
  } catch (error) {
    if (error.status === 404) return { refusal: "this mpsd keeps no history" };
    return { refusal: explained(error), isPassing: true };
  }
}

const headingOf = (by) => HEADINGS[by] ?? by.slice(LABEL.length);

/** Show an answer, and return the notes about it. */
function show(found, gpus) {
  const named = new Map(gpus.map((gpu) => [gpu.uuid, gpu]));
  const isByGpu = found.by === "gpu";
  const lines = found.history.map((series) => {
    const gpu = isByGpu ? named.get(series.key) : undefined;
    return { series, gpu, name: nameOf(series.key, gpu, found), id: series.key === null ? "others" : `key ${series.key}` };
  });
  const sorted = [...lines].sort((one, other) => other.series.total.threads_granted - one.series.total.threads_granted);
  const charted = isByGpu ? lines : sorted.slice(0, MOST_CHARTS);
  showTotals(sorted, found);
  const scales = scalesOf(charted);
  bring(byId("history-list"), charted, (line) => `${found.by} ${line.id}`, create, (card, line) => update(card, line, found, scales));
  const gaps = found.gaps.map((each) => `${clock(each.since)} to ${clock(each.until)}: ${each.because}`);
  const notes = [
    found.because, ...gaps,
    lines.length > charted.length ? `the first ${charted.length} have charts` : "",
    found.left_out ? `${found.left_out} more with less are left out` : "",
    lines.length === 0 ? "nothing was granted" : "",
  ];
  return notes.filter((each) => each).join("; ");
}

function clear() {
  byId("history-list").replaceChildren();
  byId("history-totals").hidden = true;
}

function nameOf(key, gpu, found) {
  if (gpu !== undefined) return `GPU ${gpu.index}`;
  if (key === null) return OTHERS[found.by] ?? "other leases"; // without the name or label, or not counted separately
  return found.users[key] ?? key;
}

function showTotals(lines, found) {
  const table = byId("history-totals");
  const heading = headingOf(found.by);
  table.hidden = lines.length === 0;
  say(table.caption, `Totals of the last day by ${heading}`);
  const headings = [heading, ...COLUMNS.map(([each]) => each)];
  bring(table.tHead.rows[0], headings, (each) => each, (each) => make("th", { role: "columnheader", scope: "col" }, each));
  bring(table.tBodies[0], lines, (line) => `${found.by} ${line.id}`, () => createRow(heading), (row, line) => {
    [line.name, ...COLUMNS.map(([, text]) => text(line.series.total))].forEach((text, number) => say(row.cells[number], text));
  });
}

function createRow(heading) {
  const first = make("td", { role: "cell", class: "free", "data-heading": heading });
  return make("tr", { role: "row" }, first, ...COLUMNS.map(([each]) => make("td", { role: "cell", class: "number", "data-heading": each })));
}

/** Return the amounts at the full height of the charts: one scale for all of them, so that they compare. */
function scalesOf(lines) {
  const samples = lines.flatMap((line) => line.series.samples);
  const most = (least, amount) => samples.reduce((found, each) => Math.max(found, amount(each)), least);
  const memory = Math.max(...lines.map((line) => line.gpu?.memory_total ?? 0), 1);
  return {
    threads: most(100, (each) => each.threads_granted),
    memory: most(memory, (each) => Math.max(each.memory_granted, each.memory_held ?? 0)),
  };
}

function create() {
  const parts = {
    name: make("h3"), threadsText: make("p", { class: "soft" }), threads: make("div"),
    memoryText: make("p", { class: "soft" }), memory: make("div"), axis: make("div"),
    summary: make("summary"), table: make("div"),
  };
  const { name, threadsText, threads, memoryText, memory, axis, summary, table } = parts;
  const card = make("article", { class: "card" }, name, threadsText, threads, memoryText, memory, axis, make("details", {}, summary, table));
  return Object.assign(card, { parts });
}

/** Draw a card anew inside its parts, so that an open table stays open, and keeps the focus. */
function update(card, { series, name }, found, scales) {
  const { parts } = card;
  say(parts.name, name);
  say(parts.threadsText, `Threads granted; the full height is ${percent(scales.threads)}`);
  parts.threads.replaceChildren(course(series, found, `${name}: threads granted`, (each) => each.threads_granted / scales.threads, null));
  say(parts.memoryText, `Memory granted, and in use as a line; the full height is ${size(scales.memory)}`);
  parts.memory.replaceChildren(course(
    series, found, `${name}: memory granted and in use`, (each) => each.memory_granted / scales.memory,
    (each) => (each.memory_held === null ? null : each.memory_held / scales.memory),
  ));
  parts.axis.replaceChildren(axisOf(found));
  say(parts.summary, `Numbers of ${name}, for each hour`);
  parts.table.replaceChildren(hourTable(name, series));
}
