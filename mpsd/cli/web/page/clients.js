/* The table of clients: who they are, what they hold, and their ends. */

import { bring, byId, make, say, set } from "./dom.js";
import { endButton } from "./actions.js";
import { size } from "./words.js";

const COLUMNS = [
  ["PID", (client) => `${client.pid}`],
  ["Program", (client) => client.name],
  ["User", (client, node) => node.users[client.uid] ?? "unknown"],
  ["GPU", (client) => client.daemon.replace(/^gpu/, "")],
  ["Held", (client) => (client.memory_held === null ? "-" : size(client.memory_held))],
  ["Lease", (client) => client.lease ?? "none"],
  ["State", (client) => (client.because ? `${client.verdict}: ${client.because}` : client.verdict)],
];
const KINDS = { PID: "number", Held: "number", Lease: "number", Program: "free", User: "free", State: "free" };

/** Make the headings once. */
export function prepareClients() {
  const headings = [...COLUMNS.map(([heading]) => heading), "Actions"];
  byId("client-table").tHead.rows[0].append(
    ...headings.map((heading) => make("th", { role: "columnheader", scope: "col" }, heading)),
  );
}

/** Show the clients: first those with a violation, then those that hold most. */
export function showClients(node, principal, done) {
  const place = (client) => [client.verdict === "violation" ? 0 : 1, -(client.memory_held ?? 0), client.pid];
  const clients = node.clients.map((client) => ({ client, place: place(client) }));
  clients.sort((one, other) => one.place.map((each, number) => each - other.place[number]).find((each) => each !== 0) ?? 0);
  const rows = clients.length ? clients.map((each) => each.client) : [null];
  bring(byId("client-table").tBodies[0], rows, (client) => (client === null ? "none" : `${client.daemon} ${client.pid}`), create, (row, client) => {
    if (client === null) return;
    COLUMNS.forEach(([heading, show], number) => {
      const cell = row.cells[number];
      say(heading === "Lease" ? cell.firstElementChild : cell, show(client, node));
      if (heading === "Lease" && client.lease) set(cell.firstElementChild, "href", `#/story/${client.lease}`);
      if (heading === "State") set(cell, "class", client.verdict === "violation" ? "free state-bad" : "free");
    });
    const actions = row.cells[COLUMNS.length].firstElementChild;
    bring(actions, endButton(client, principal, done), () => "end", (button) => button);
  });
}

function create(client) {
  if (client === null) {
    return make("tr", { role: "row" }, make("td", { role: "cell", class: "none", colspan: COLUMNS.length + 1 }, "no clients"));
  }
  const cells = COLUMNS.map(([heading]) => {
    const cell = make("td", { role: "cell", class: KINDS[heading] ?? "", "data-heading": heading });
    if (heading === "Lease") cell.append(make("a"));
    return cell;
  });
  const actions = make("td", { role: "cell", "data-heading": "Actions" }, make("div", { class: "actions" }));
  return make("tr", { role: "row" }, ...cells, actions);
}
