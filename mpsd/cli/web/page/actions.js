/* The actions of a user. Each button opens a dialog first, which describes the effect. */

import { ask, explained } from "./server.js";
import { byId, make, say } from "./dom.js";

const RANKS = ["observer", "user", "operator", "admin"];

/** Tell whether a principal has at least this role. */
export const mayAs = (principal, role) => RANKS.indexOf(principal.role) >= RANKS.indexOf(role);

const ANNOUNCEMENTS = 10;

/** Have a screen reader speak a message. Another one may follow at once, so each is a paragraph that stays for a while. */
export function announce(text) {
  const spoken = byId("announcement");
  spoken.append(make("p", {}, text));
  while (spoken.childElementCount > ANNOUNCEMENTS) spoken.firstElementChild.remove();
}

const REASON = { name: "reason", label: "Reason, shown to users whose requests are refused meanwhile (optional)", most: 200 };
const TIMEOUT = { name: "timeout", label: "Seconds after which mpsd ends the remaining clients (empty: never)", number: true };

const OPERATIONS = {
  hold: { title: "Hold", role: "operator", fields: () => [REASON] },
  drain: {
    title: "Drain", role: "operator", grave: true,
    fields: (principal) => [REASON, ...(mayAs(principal, "admin") ? [TIMEOUT] : [])],
  },
  resume: { title: "Resume", role: "operator", fields: () => [] },
  restart: { title: "Restart", role: "admin", grave: true, fields: () => [REASON, TIMEOUT] },
  reset: { title: "Reset", role: "admin", fields: () => [] },
};

/** Return the operations that this principal may begin on a control daemon in its current state. */
export function operationsOf(daemon, principal) {
  const isStopped = ["held", "draining"].includes(daemon.state) || daemon.drained;
  const senseful = daemon.state === "failed" ? ["reset"] : isStopped ? ["resume", "restart"] : ["hold", "drain", "restart"];
  return senseful.filter((verb) => mayAs(principal, OPERATIONS[verb].role));
}

/** Make the button of an operation. */
export function operationButton(verb, daemon, principal, done) {
  const { title, grave, fields } = OPERATIONS[verb];
  return make("button", {
    type: "button", class: grave ? "grave" : "", "aria-label": `${title} ${daemon}`,
    onclick: () => question({
      title: `${title} ${daemon}?`,
      text: [principal.promises[verb], ...(fields(principal).includes(TIMEOUT) ? [`With a timeout: ${principal.promises.timeout}`] : [])],
      verb: title,
      fields: fields(principal),
      act: async (values) => {
        const operation = await ask("POST", `/v1/daemons/${daemon}/${verb}`, values);
        return `${operation.daemon}: ${operation.verb} ${operation.state}: ${operation.because}`;
      },
      done,
    }),
  }, title);
}

/** Make the buttons of a lease, for its owner and for administrators. An ended lease has none. */
export function leaseButtons(lease, principal, done) {
  const may = mayAs(principal, "admin") || (mayAs(principal, "user") && lease.owner.uid === principal.uid);
  if (!may || lease.ended !== null) return [];
  const name = lease.name ? `${lease.id} (${lease.name})` : lease.id;
  const release = make("button", {
    type: "button", class: "grave", "aria-label": `Release ${name}`,
    onclick: () => question({
      title: `Release ${name}?`,
      text: [lease.state === "waiting" ? "It gives up its place in the queue." : principal.promises.release],
      verb: "Release",
      fields: [],
      act: async () => {
        await ask("DELETE", `/v1/leases/${lease.id}`);
        return `${lease.id} is released`;
      },
      done,
    }),
  }, "Release");
  if (lease.expires === null) return [release];
  const renew = make("button", {
    type: "button", "aria-label": `Renew ${name}`,
    onclick: () => question({
      title: `Renew ${name}?`,
      text: ["It expires so many seconds from now, instead of at its present time."],
      verb: "Renew",
      fields: [{ name: "ttl", label: "Seconds from now", number: true, value: "3600", required: true }],
      act: async (values) => {
        await ask("POST", `/v1/leases/${lease.id}/renew`, values);
        return `${lease.id} is renewed`;
      },
      done,
    }),
  }, "Renew");
  return [renew, release];
}

/** Make the button that ends a client, in a list, for administrators; an empty list for others. */
export function endButton(client, principal, done) {
  if (!mayAs(principal, "admin")) return [];
  const name = `process ${client.pid}`;
  return [make("button", {
    type: "button", class: "grave", "aria-label": `End ${name}`,
    onclick: () => question({
      title: `End ${name} (${client.name})?`,
      text: [principal.promises.end],
      verb: "End",
      fields: [],
      act: async () => (await ask("POST", `/v1/clients/${client.pid}/end`, {})).because,
      done,
    }),
  }, "End")];
}

/** Ask in a dialog, and act if the user confirms. The dialog shows a refusal, which changes nothing. */
export function question({ title, text, verb, fields, act, done }) {
  const dialog = byId("question");
  const refusal = make("p", { class: "refusal", role: "alert" });
  const inputs = fields.map((each) => make("input", {
    name: each.name, value: each.value ?? "", maxlength: each.most ?? null, required: each.required ?? false,
    autocomplete: "off", inputmode: each.number ? "decimal" : "text", pattern: each.number ? "[0-9]+([.][0-9]+)?" : null,
  }));
  const yes = make("button", { type: "submit", class: "grave" }, verb);
  const no = make("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = make("form", {
    novalidate: true,
    onsubmit: async (event) => {
      event.preventDefault();
      const wrong = inputs.find((input) => !input.checkValidity());
      if (wrong) {
        say(refusal, `${wrong.closest("label").firstChild.textContent.trim()}: a number is needed`);
        wrong.focus();
        return;
      }
      yes.disabled = true;
      try {
        const said = await act(valuesOf(fields, inputs));
        dialog.close();
        announce(said);
        done();
      } catch (error) {
        say(refusal, explained(error));
        yes.disabled = false;
        no.focus();
      }
    },
  }, ...inputs.map((input, number) => make("label", {}, `${fields[number].label} `, input)), refusal,
  make("div", { class: "actions" }, no, yes));
  dialog.replaceChildren(
    make("h2", { id: "question-heading" }, title),
    make("div", { id: "question-text" }, ...text.map((each) => make("p", {}, each))),
    form,
  );
  dialog.showModal();
  (inputs[0] ?? no).focus();
}

function valuesOf(fields, inputs) {
  const filled = fields.map((each, number) => [each, inputs[number].value.trim()]).filter(([, value]) => value !== "");
  return Object.fromEntries(filled.map(([each, value]) => [each.name, each.number ? Number(value) : value]));
}
