/*
 * The page shows mpsd's answers. It requests them again after each event, and every few seconds.
 *
 * The fragment of the address is the view: `#/` with filter and order of the leases and the grouping of the history, `#/SECTION`, `#/story/SUBJECT`.
 */

import { Events, isGrave } from "./events.js";
import { announce } from "./actions.js";
import { ask, explained, forget, hasSession, linesOf, openSession } from "./server.js";
import { beginStory, readStory } from "./story.js";
import { bringTexts, byId, say, set } from "./dom.js";
import { age, clock, plural, setClock } from "./words.js";
import { prepareClients, showClients } from "./clients.js";
import { prepareTables, showLeases } from "./leases.js";
import { prepareHistory, readHistory, showGrouping, showLabels } from "./history.js";
import { showGpus } from "./gpus.js";

const EVERY = 5000;
const SOON = 500;
const HISTORY_EVERY = 300000;
const LONGEST_PAUSE = 5000;
const GIVE_UP = 60000; // after this long, another program may have the port

const events = new Events();
const view = { filter: "", sort: "", down: false, ended: false, by: "gpu" };
let principal = null;
let node = null;
let isPaused = false;
let isOver = false;
let isRefreshing = false;
let isWanted = false;
let timer = null;
let answeredAt = Date.now();

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// -- display ----------------------------------------------------------------------------------------------------------

function show() {
  if (node === null || isPaused) return;
  const { status } = node;
  byId("overview").hidden = byId("story").subject !== undefined && !byId("story").hidden;
  if (byId("story").hidden) {
    say(byId("headline"), status.reasons.length ? status.headline.split(":")[0] : status.headline);
    set(byId("headline"), "class", status.healthy ? "good" : "bad");
    document.title = `${status.healthy ? "" : "NOT HEALTHY - "}${principal.host} - mpsd`;
  }
  bringTexts(byId("reasons"), toKnow(status, byId("story").hidden ? byId("headline").textContent : ""));
  const counts = `${plural(status.leases, "lease")}, ${status.waiting} waiting, ${plural(status.clients, "client")}`;
  const simulated = status.simulated ? ", on simulated GPUs" : "";
  say(byId("counts"), `${counts}; mpsd ${status.version}, up ${age(status.since, node.now)}${simulated}`);
  bringTexts(byId("notes"), status.notes.map((each) => `note: ${each}`));
  showGpus(node, principal, refreshSoon);
  showLeases(node, principal, view, refreshSoon);
  showClients(node, principal, refreshSoon);
  showLabels(node.leases);
  events.show();
}

/** Return the problems with their remedies, and the limits that mpsd set back, without repeating the first line. */
function toKnow(status, first) {
  const remedy = (subject, each) => (first.includes(each.because) ? `${subject}: ${each.hint}` : `${each.because} → ${each.hint}`);
  const subject = (each) => each.subject ?? `${each.kind}, process ${each.pid}`;
  const lingers = status.violations.filter((each) => each.kind === "lingers"); // which the fault names, too
  const others = status.violations.filter((each) => each.kind !== "lingers");
  return [
    ...[...status.reasons, ...others, ...status.warnings, ...lingers].map((each) => remedy(subject(each), each)),
    ...status.daemons.flatMap((each) => each.undone).map((each) => `${each.because} (${age(each.undone, node.now)} ago)`),
  ];
}

/** Show that the page's content is old, and why; an empty text removes the message. */
function trouble(text) {
  document.body.classList.toggle("stale", text !== "");
  say(byId("connection"), text && node ? `${text}; this is how the node was at ${clock(node.now)}` : text);
}

/** End the page for good: its server is gone, or does not know its session. */
function end(text) {
  isOver = true;
  clearTimeout(timer);
  forget();
  trouble(text);
  if (node === null) {
    say(byId("headline"), "This page is closed");
    set(byId("headline"), "class", "bad");
  }
}

// -- requests ---------------------------------------------------------------------------------------------------------

async function refresh() {
  principal ??= await ask("GET", "/page/principal");
  setClock(principal.offset);
  const before = node?.status.headline;
  node = await ask("GET", "/page/node");
  answered();
  say(byId("host"), principal.host);
  say(byId("who"), `${principal.user || "you"}, ${principal.role}`);
  if (before !== undefined && before !== node.status.headline) announce(node.status.headline);
  show();
  const { subject, hidden } = byId("story");
  if (!hidden && !isPaused) await readStory(subject, node, principal, refreshSoon);
}

function answered() {
  answeredAt = Date.now();
  trouble("");
}

/** Handle a failed request: end the page, or show a message and try again later. */
function failed(error) {
  if (error.status === 401 || error.code === "no_session") end(explained(error));
  else if (error.status) {
    answeredAt = Date.now();
    trouble(`mpsd does not answer: ${explained(error)}`);
  } else if (Date.now() - answeredAt > GIVE_UP) end("mpsctl web does not answer any more: start it again, and open its link");
  else trouble("mpsctl web does not answer");
}

/** Schedule a refresh soon, after a change. */
function refreshSoon() {
  isWanted = true;
  if (!isRefreshing) wait(SOON);
}

function wait(milliseconds) {
  clearTimeout(timer);
  if (!isOver) timer = setTimeout(refreshNow, milliseconds);
}

/** Refresh the page, never twice at a time, and schedule the next refresh. A hidden tab sends no requests. */
async function refreshNow() {
  if (isOver || isRefreshing) return;
  isRefreshing = true;
  isWanted = false;
  if (!document.hidden) await refresh().catch(failed);
  isRefreshing = false;
  wait(isWanted ? SOON : EVERY);
}

/** Follow the events for the life of the page, from the last one that it has. */
async function follow() {
  let pause = 1000;
  while (!isOver) {
    try {
      let isNew = events.last !== null;
      for await (const line of linesOf(events.last === null ? "/page/events" : `/page/events?after=${events.last}`)) {
        if (isOver) return;
        pause = 1000;
        if (line === null) {
          isNew = true; // the stored events have all arrived
          showEvents();
        } else if (line.ended) {
          end("mpsctl web has ended: start it again, and open its link");
          return;
        } else {
          events.add(line);
          if (isNew) arrived(line);
        }
      }
    } catch (error) {
      failed(error);
    }
    await sleep(pause);
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
}

let drawing = null;

function showEvents() {
  if (!isPaused) events.show();
}

function arrived(event) {
  if (isGrave(event)) announce(event.sentence);
  drawing ??= setTimeout(() => {
    drawing = null;
    showEvents();
    refreshSoon();
  }, SOON);
}

// -- views ------------------------------------------------------------------------------------------------------------

/** Show the view that the address names. */
function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [kind, subject] = path.split("/");
  const story = byId("story");
  const wasStory = !story.hidden;
  if (kind === "story" && subject) {
    if (story.subject !== subject) beginStory(subject);
    story.hidden = false;
    byId("overview").hidden = true;
    set(byId("headline"), "class", "");
    say(byId("headline"), subject);
    byId("headline").tabIndex = -1;
    byId("headline").focus();
    if (node !== null) readStory(subject, node, principal, refreshSoon).catch(failed);
    return;
  }
  story.hidden = true;
  delete story.subject;
  delete story.parts; // its elements would stay in memory
  story.replaceChildren();
  byId("overview").hidden = node === null;
  const said = new URLSearchParams(query);
  const { by } = view;
  Object.assign(view, { filter: said.get("filter") ?? "", sort: said.get("sort") ?? "", down: said.has("down"), ended: said.has("ended"), by: said.get("by") ?? "gpu" });
  byId("filter").value = view.filter;
  byId("ended").checked = view.ended;
  showGrouping(view);
  if (view.by !== by && node !== null) readHistory(node.status.gpus, view.by);
  show();
  const heading = kind ? byId(`${kind}-heading`) : null;
  if (heading !== null) {
    heading.focus();
    heading.scrollIntoView();
  } else if (wasStory) byId("main").focus();
}

/** Keep the view in the address, so that the address can be shared. */
function keepView() {
  const said = new URLSearchParams();
  if (view.filter) said.set("filter", view.filter);
  if (view.sort) said.set("sort", view.sort);
  if (view.down) said.set("down", "");
  if (view.ended) said.set("ended", "");
  if (view.by !== "gpu") said.set("by", view.by);
  const query = said.toString();
  history.replaceState(null, "", query ? `#/?${query}` : "#/");
  show();
}

function prepare() {
  prepareTables(view, keepView);
  prepareClients();
  prepareHistory(view, () => {
    keepView();
    if (node !== null) readHistory(node.status.gpus, view.by, true);
  });
  byId("filter").addEventListener("input", (event) => {
    view.filter = event.target.value;
    keepView();
  });
  byId("ended").addEventListener("change", (event) => {
    view.ended = event.target.checked;
    keepView();
  });
  byId("level").addEventListener("change", () => events.show());
  byId("pause").addEventListener("click", () => {
    isPaused = !isPaused;
    set(byId("pause"), "aria-pressed", `${isPaused}`);
    show();
  });
  byId("skip").addEventListener("click", () => byId("main").focus());
  window.addEventListener("hashchange", route);
  document.addEventListener("visibilitychange", () => document.hidden || refreshSoon());
}

async function keepHistory() {
  while (!isOver) {
    if (node !== null && !document.hidden && !isPaused) await readHistory(node.status.gpus, view.by).catch(() => {});
    await sleep(node === null ? 1000 : HISTORY_EVERY);
  }
}

async function start() {
  prepare();
  try {
    await openSession();
  } catch (error) {
    end(explained(error));
    return;
  }
  if (!hasSession()) {
    end("open the link that mpsctl web printed; each link opens the page once");
    return;
  }
  await refreshNow();
  route();
  follow();
  keepHistory();
}

start();
