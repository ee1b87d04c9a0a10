/* Events as the sentences that mpsctl prints, the latest first. */

import { bring, byId, make } from "./dom.js";

/** The number of events that the page keeps. */
export const MOST = 200;

const GRAVE = new Set(["warning", "error"]);

/** Make the line of an event, with a link to the story of the lease that it names. */
export function lineOf(event) {
  const said = make("span", { class: "said" });
  const [lease] = event.leases;
  const at = lease === undefined ? -1 : event.sentence.indexOf(lease);
  if (at < 0) said.append(event.sentence);
  else {
    const link = make("a", { href: `#/story/${lease}` }, lease);
    said.append(event.sentence.slice(0, at), link, event.sentence.slice(at + lease.length));
  }
  return make("li", { class: event.level }, make("time", {}, event.when), said);
}

/** The events that the page keeps and shows. */
export class Events {
  constructor() {
    this.kept = [];
    this.last = null;
  }

  /** Add an event, unless the page has it: after a lost connection, it requests the events after the last one. */
  add(event) {
    if (this.last !== null && event.seq <= this.last) return;
    this.last = event.seq;
    this.kept.unshift(event);
    if (this.kept.length > MOST) this.kept.length = MOST;
  }

  show() {
    const all = byId("level").value === "info";
    const shown = this.kept.filter((each) => all || GRAVE.has(each.level));
    bring(byId("event-list"), shown, (each) => each.seq, lineOf);
  }
}

export const isGrave = (event) => GRAVE.has(event.level);
