/* GPUs as bars: each lease is a slice of the threads and of the memory. The page shows the numbers of every bar too. */

import { age, percent, plural, size } from "./words.js";
import { bring, byId, make, say, set } from "./dom.js";
import { operationButton, operationsOf } from "./actions.js";

const COLOURS = 8;
const OTHER = "var(--slice-other)";
const UNLEASED = "var(--slice-unleased)";
const LOOKS = { ok: "good", ready: "good", faulty: "bad", lost: "bad", failed: "bad" };

/** Return the look of a GPU's health, or of its daemon's state: what may not serve its clients is never good. */
const look = (word, gpu) => `state-${gpu.impaired ? "bad" : LOOKS[word] ?? "warn"}`;

/** Give each slice a colour, by its id where that is free: neighbours differ, and all of them as far as colours last. */
function paint(slices) {
  const left = new Set();
  let before = -1;
  for (const slice of slices) {
    if (left.size <= 1) for (let colour = 0; colour < COLOURS; colour += 1) left.add(colour);
    let colour = 0;
    for (const letter of slice.key) colour = (colour * 31 + letter.codePointAt(0)) % 65521;
    colour %= COLOURS;
    while (!left.has(colour) || colour === before) colour = (colour + 1) % COLOURS;
    left.delete(colour);
    before = colour;
    slice.colour = `var(--slice-${colour})`;
  }
}

/** Return the slices of a GPU: its leases, the hidden leases of other users, and clients without a lease. */
function slicesOf(gpu, node, principal) {
  const shares = node.leases
    .filter((lease) => lease.ended === null && lease.granted !== null)
    .flatMap((lease) => lease.shares.filter((share) => share.gpu === gpu.uuid).map((share) => ({ lease, share })));
  const slices = shares.map(({ lease, share }) => ({
    key: lease.id,
    name: lease.name || lease.id,
    lease: lease.id,
    own: lease.owner.uid === principal.uid,
    user: node.users[lease.owner.uid],
    threads: share.active_thread_percentage,
    memory: share.pinned_device_mem_limit,
  }));
  const shown = (what) => slices.reduce((sum, each) => sum + each[what], 0);
  const others = {
    key: "others", name: "leases of other users", colour: OTHER,
    threads: Math.round((gpu.threads_granted - shown("threads")) * 10) / 10, memory: gpu.memory_granted - shown("memory"),
  };
  const unleased = {
    key: "unleased", name: `${plural(gpu.clients_unleased, "client")} without a lease`, colour: UNLEASED,
    threads: gpu.threads_unleased, memory: gpu.memory_unleased,
  };
  slices.sort((one, other) => Number(other.own) - Number(one.own));
  paint(slices);
  return [...slices, ...[others, unleased].filter((each) => each.threads > 0 || each.memory > 0)];
}

/** Show the GPUs. */
export function showGpus(node, principal, done) {
  const daemons = new Map(node.status.daemons.map((each) => [each.gpu, each]));
  bring(byId("gpu-list"), node.status.gpus, (gpu) => gpu.index, create, (card, gpu) => {
    update(card, gpu, daemons.get(gpu.uuid), node, principal, done);
  });
}

function create(gpu) {
  const heading = `gpu-${gpu.index}`;
  const card = make("article", { class: "card", "aria-labelledby": heading });
  card.parts = {
    model: make("span", { class: "soft" }),
    state: make("p"), health: make("span"), daemon: make("span"), clients: make("span"),
    trouble: make("p"),
    threads: make("div", { class: "bar", role: "img" }), threadsFigure: make("span", { class: "figure" }),
    memory: make("div", { class: "bar", role: "img" }), memoryFigure: make("span", { class: "figure" }),
    held: make("div", { class: "bar thin", role: "img" }), heldFigure: make("span", { class: "figure" }),
    legend: make("ul", { class: "legend", "aria-label": `Slices of GPU ${gpu.index}` }),
    actions: make("div", { class: "actions" }),
  };
  const { model, state, health, daemon, clients, trouble, threads, memory, held, legend, actions } = card.parts;
  const { threadsFigure, memoryFigure, heldFigure } = card.parts;
  state.append(health, " · ", daemon, " · ", clients);
  const measure = (name, bar, figure) => make("div", { class: "measure" }, make("span", {}, name), bar, figure);
  card.append(
    make("h3", { id: heading }, make("a", { href: `#/story/${gpu.index}` }, `GPU ${gpu.index}`), " ", model),
    state, trouble,
    measure("Threads", threads, threadsFigure), measure("Memory", memory, memoryFigure), measure("Held", held, heldFigure),
    legend, actions,
  );
  return card;
}

function update(card, gpu, daemon, node, principal, done) {
  const parts = card.parts;
  const slices = slicesOf(gpu, node, principal);
  say(parts.model, gpu.name ?? "of unknown name");
  say(parts.health, gpu.impaired && gpu.health === "ok" ? "impaired" : gpu.health);
  set(parts.health, "class", look(gpu.health, gpu));
  const state = daemon === undefined ? "no control daemon" : daemon.drained && daemon.state === "draining" ? "drained" : daemon.state;
  say(parts.daemon, daemon === undefined ? state : `${daemon.name} ${state} for ${age(daemon.since, node.now)}`);
  set(parts.daemon, "class", look(daemon?.state, gpu));
  say(parts.clients, `${gpu.clients + gpu.clients_unleased} of ${gpu.clients_max ?? "unknown"} client places taken`);
  const troubles = [gpu, ...(daemon ? [daemon] : [])].filter((each) => each.hint).map((each) => `${each.because}: ${each.hint}`);
  const { obstacle } = gpu;
  if (obstacle && troubles.length === 0) troubles.push(`GPU ${gpu.index} is not for you now: ${obstacle.because}: ${obstacle.hint}`);
  say(parts.trouble, troubles.join("; "));

  const total = gpu.memory_total ?? 0;
  const all = Math.max(gpu.threads_total, gpu.threads_granted + gpu.threads_unleased);
  const granted = `${percent(gpu.threads_granted)} of ${percent(gpu.threads_total)}`;
  const memory = `${size(gpu.memory_granted)} of ${gpu.memory_total === null ? "unknown" : size(total)}`;
  showBar(parts.threads, slices, (each) => (100 * each.threads) / all, `Threads granted: ${granted}`);
  showBar(parts.memory, slices, (each) => (total ? (100 * each.memory) / total : 0), `Memory granted: ${memory}`,
    total ? (100 * gpu.memory_reserved) / total : 0);
  const held = gpu.memory_held === null ? "unknown" : size(gpu.memory_held);
  const heldSlice = { key: "held", colour: "var(--text)", memory: gpu.memory_held ?? 0 };
  showBar(parts.held, [heldSlice], (each) => (total ? (100 * each.memory) / total : 0), `Memory held: ${held}`);
  say(parts.threadsFigure, `${granted} granted`);
  say(parts.memoryFigure, `${memory} granted, ${size(gpu.memory_reserved)} reserved`);
  say(parts.heldFigure, gpu.memory_held === null ? "unknown" : `${held} of ${size(total)} in use`);

  bring(parts.legend, slices, (each) => each.key, createEntry, (entry, each) => {
    entry.swatch.style.background = each.colour;
    say(entry.name, each.name);
    say(entry.figures, `${percent(each.threads)}, ${size(each.memory)}${each.user ? `, ${each.user}` : ""}${each.own ? " (your own)" : ""}`);
  });

  const verbs = daemon === undefined ? [] : operationsOf(daemon, principal);
  bring(parts.actions, verbs, (verb) => verb, (verb) => operationButton(verb, daemon.name, principal, done));
}

function createEntry(slice) {
  const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
  const name = slice.lease ? make("a", { href: `#/story/${slice.lease}` }) : make("span");
  const figures = make("span", { class: "soft" });
  return Object.assign(make("li", {}, swatch, name, figures), { swatch, name, figures });
}

/** Show slices in proportion to their amounts; the accessible name of the bar contains the numbers. */
function showBar(bar, slices, partOf, label, reserved = 0) {
  const shown = slices.filter((each) => partOf(each) > 0);
  const words = shown.filter((each) => each.name).map((each) => `${each.name} ${Number(partOf(each).toFixed(1))}%`);
  set(bar, "aria-label", [label, ...words].join("; "));
  const all = reserved > 0 ? [...shown, { key: "reserved", name: "reserve of mpsd and the driver" }] : shown;
  bring(bar, all, (each) => each.key, () => make("div"), (slice, each) => {
    const isReserve = each.key === "reserved";
    set(slice, "class", `slice${each.own ? " own" : ""}${isReserve ? " reserved" : ""}`);
    if (each.name) set(slice, "title", each.name);
    slice.style.width = `${Math.min(isReserve ? reserved : partOf(each), 100)}%`;
    if (!isReserve) slice.style.background = each.colour;
  });
}
