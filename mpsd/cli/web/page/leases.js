/* The tables of leases and of the queue. */

import { age, percent, plural, size, until } from "./words.js";
import { bring, byId, make, say, set } from "./dom.js";
import { leaseButtons } from "./actions.js";

const alike = (values) => [...new Set(values)].join(",");
const expiry = (lease) => (lease.expires === null || lease.ended !== null ? null : lease.expires);

function held(lease, node) {
  const found = node.clients.filter((each) => each.lease === lease.id && each.memory_held !== null);
  return found.length === 0 ? null : found.reduce((sum, each) => sum + each.memory_held, 0);
}

function threads(lease) {
  if (lease.shares.length) return alike(lease.shares.map((each) => percent(each.active_thread_percentage)));
  return lease.active_thread_percentage === null ? "-" : percent(lease.active_thread_percentage);
}

function memory(lease) {
  if (lease.shares.length) return alike(lease.shares.map((each) => size(each.pinned_device_mem_limit)));
  return lease.pinned_device_mem_limit === null ? "-" : size(lease.pinned_device_mem_limit);
}

/** Return the number of a lease's clients, without those that lost their server. */
function clients(lease) {
  const lost = lease.lost?.length ?? 0;
  const most = lease.processes * (lease.shares.length || 1) || "any";
  return `${lease.clients.length - lost} of ${most}${lost ? `, ${lost} lost` : ""}`;
}

/** The columns: heading, text, and the sort key if it differs from the text. */
const COLUMNS = [
  ["Lease", (lease) => lease.id],
  ["State", (lease) => (lease.wait ? `${lease.state}, place ${lease.wait.position}` : lease.state)],
  ["GPU", (lease) => alike(lease.shares.map((each) => each.daemon.replace(/^gpu/, ""))) || "-"],
  ["Threads", threads, (lease) => lease.active_thread_percentage ?? 0],
  ["Memory", memory, (lease) => lease.pinned_device_mem_limit ?? 0],
  ["Held", (lease, node) => { const found = held(lease, node); return found === null ? "-" : size(found); }, (lease, node) => held(lease, node) ?? 0],
  ["User", (lease, node) => node.users[lease.owner.uid]],
  ["Clients", clients, (lease) => lease.clients.length],
  ["Age", (lease, node) => age(lease.created, node.now), (lease) => -Date.parse(lease.created)],
  ["Expires", (lease, node) => (expiry(lease) === null ? "-" : until(lease.expires, node.now)), (lease) => (expiry(lease) === null ? Infinity : Date.parse(lease.expires))],
  ["Name", (lease) => lease.name || "-"],
];

const WAITING = [
  ["Place", (lease) => `${lease.wait.position}`],
  ["Lease", (lease) => lease.id],
  ["User", (lease, node) => node.users[lease.owner.uid]],
  ["Threads", threads],
  ["Memory", memory],
  ["Waits for", (lease) => lease.wait.waits_for],
  ["Since", (lease, node) => age(lease.created, node.now)],
  ["Because", (lease) => lease.wait.because],
  ["Name", (lease) => lease.name || "-"],
];

const FREE = new Set(["Name", "Because", "User"]);
const NUMBERS = new Set(["Lease", "Threads", "Memory", "Held", "Clients", "Age", "Expires", "Place", "Since"]);

/** Return the leases of a view: filtered by its text, and sorted by its column, or the principal's own first. */
export function arranged(node, principal, view) {
  const text = view.filter.toLowerCase();
  const found = node.leases.filter((lease) => (view.ended || lease.ended === null)
    && (!text || COLUMNS.some(([, show]) => show(lease, node).toLowerCase().includes(text))));
  const place = (lease) => [lease.ended !== null, lease.owner.uid !== principal.uid, lease.wait?.position ?? 0].map(Number);
  const byPlace = (one, other) => {
    const differs = place(one).map((each, number) => each - place(other)[number]).find((each) => each !== 0);
    return differs ?? 0;
  };
  const column = COLUMNS.find(([heading]) => heading === view.sort);
  if (column === undefined) return found.sort(byPlace);
  const [, show, value = show] = column;
  const sign = view.down ? -1 : 1;
  return found.sort((one, other) => {
    const [a, b] = [value(one, node), value(other, node)];
    return sign * (a < b ? -1 : a > b ? 1 : 0);
  });
}

/** Make the headings once. The first click on a heading sorts, the second reverses it, the third undoes it. */
export function prepareTables(view, change) {
  const sortable = COLUMNS.map(([heading]) => make("th", { role: "columnheader", scope: "col" }, make("button", {
    type: "button",
    onclick: () => {
      if (view.sort !== heading) Object.assign(view, { sort: heading, down: false });
      else if (!view.down) view.down = true;
      else Object.assign(view, { sort: "", down: false });
      change();
    },
  }, heading)));
  const plain = (heading) => make("th", { role: "columnheader", scope: "col" }, heading);
  byId("lease-table").tHead.rows[0].append(...sortable, plain("Actions"));
  byId("queue-table").tHead.rows[0].append(...WAITING.map(([heading]) => plain(heading)), plain("Actions"));
}

/** Show both tables, and the sums of the leases that are not shown. */
export function showLeases(node, principal, view, done) {
  [...byId("lease-table").tHead.rows[0].cells].forEach((cell) => {
    const isSorted = cell.textContent === view.sort;
    set(cell, "aria-sort", isSorted ? (view.down ? "descending" : "ascending") : "none");
  });
  const context = { node, principal, done };
  showRows(byId("lease-table").tBodies[0], arranged(node, principal, view), COLUMNS, view.filter ? "no lease has this text" : "no leases", context);
  const waiting = node.leases.filter((lease) => lease.wait !== null && lease.ended === null);
  waiting.sort((one, other) => one.wait.position - other.wait.position);
  showRows(byId("queue-table").tBodies[0], waiting, WAITING, "no lease waits", context);
  say(byId("others"), sumOf(node.others));
}

function sumOf(others) {
  if (!others.leases) return "";
  const waiting = others.waiting ? `, ${others.waiting} of them waiting` : "";
  const sum = `${percent(others.threads_granted)} and ${size(others.memory_granted)}`;
  return `and ${plural(others.leases, "lease")} of other users, of ${sum} in all${waiting}`;
}

function showRows(body, leases, columns, none, { node, principal, done }) {
  const rows = leases.length ? leases : [null];
  bring(body, rows, (lease) => lease?.id ?? "none", (lease) => createRow(lease, columns, none), (row, lease) => {
    if (lease === null) {
      say(row.cells[0], none);
      return;
    }
    set(row, "class", lease.owner.uid === principal.uid ? "own" : "");
    columns.forEach(([heading, show], number) => {
      const cell = row.cells[number];
      say(heading === "Lease" ? cell.firstElementChild : cell, show(lease, node));
    });
    const actions = row.cells[columns.length].firstElementChild;
    const buttons = leaseButtons(lease, principal, done);
    bring(actions, buttons, (button) => `${button.textContent}${lease.state}`, (button) => button);
  });
}

function createRow(lease, columns, none) {
  if (lease === null) {
    return make("tr", { role: "row" }, make("td", { role: "cell", class: "none", colspan: columns.length + 1 }, none));
  }
  const cells = columns.map(([heading]) => {
    const kind = NUMBERS.has(heading) ? "number" : FREE.has(heading) ? "free" : "";
    const cell = make("td", { role: "cell", class: kind, "data-heading": heading });
    if (heading === "Lease") cell.append(make("a", { href: `#/story/${lease.id}` }));
    return cell;
  });
  const actions = make("td", { role: "cell", "data-heading": "Actions" }, make("div", { class: "actions" }));
  return make("tr", { role: "row" }, ...cells, actions);
}
