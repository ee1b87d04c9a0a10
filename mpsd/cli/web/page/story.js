/* The story of one lease, GPU or control daemon, with the content of `mpsctl explain`. */

import { bring, bringTexts, byId, make, say } from "./dom.js";
import { ask, explained } from "./server.js";
import { leaseButtons } from "./actions.js";
import { lineOf } from "./events.js";
import { plural } from "./words.js";

/** Make the empty parts of a story, for a new subject. */
export function beginStory(subject) {
  const story = byId("story");
  const parts = {
    trouble: make("p", { class: "refusal", role: "status" }),
    now: make("ul"), next: make("ul"), actions: make("div", { class: "actions" }),
    hidden: make("p", { class: "soft" }), events: make("ol", { class: "events", "aria-label": "Events, in order" }),
    log: make("pre", { "aria-label": "The end of the control daemon's log" }),
  };
  parts.log.hidden = true;
  story.replaceChildren(
    make("p", {}, make("a", { href: "#/" }, "Back to the node")),
    parts.trouble,
    make("h2", {}, "Now"), parts.now, parts.actions,
    make("h2", {}, "Next"), parts.next,
    make("h2", {}, "Events"), parts.hidden, parts.events, parts.log,
  );
  Object.assign(story, { parts, subject });
}

/** Read the story, and show it if the page still shows its subject. */
export async function readStory(subject, node, principal, done) {
  const story = byId("story");
  let found;
  try {
    found = await ask("GET", `/page/story/${subject}`);
  } catch (error) {
    if (!error.status) throw error;
    if (story.subject === subject) {
      say(byId("headline"), subject);
      say(story.parts.trouble, explained(error));
    }
    return;
  }
  if (story.subject !== subject) return;
  const { parts } = story;
  say(byId("headline"), found.about);
  document.title = `${found.about} - mpsd`;
  say(parts.trouble, "");
  bringTexts(parts.now, found.now);
  bringTexts(parts.next, found.next);
  const left = [
    found.earlier ? plural(found.earlier, "earlier event") : "",
    found.hidden ? `${plural(found.hidden, "event")} of leases of other users` : "",
  ];
  say(parts.hidden, left.filter((each) => each).map((each) => `(${each})`).join(" "));
  bring(parts.events, found.events, (each) => each.seq, lineOf);
  parts.log.hidden = found.log.length === 0;
  say(parts.log, found.log.join("\n"));
  const lease = node.leases.find((each) => each.id === subject);
  const buttons = lease === undefined ? [] : leaseButtons(lease, principal, done);
  bring(parts.actions, buttons, (button) => `${button.textContent}${lease.state}`, (button) => button);
}
