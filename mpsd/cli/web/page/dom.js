/* The functions here make and update elements. They set text as text, never as HTML. */

/** Return the element of this id. */
export const byId = (id) => document.getElementById(id);

/** Make an element: `make("a", { href: "#/", class: "x", onclick: f }, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Make an element of SVG. */
export function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Set the text of an element if it differs: a screen reader speaks every change. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute of an element if it differs. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/**
 * Update the children of an element from a list of items: one child for each, by its key, in the order of the list.
 * A child whose key stays is updated, not replaced, so that it keeps the focus. `update` gets the child and the item.
 */
export function bring(parent, items, keyOf, create, update = () => {}) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const wanted = items.map((item) => [String(keyOf(item)), item]);
  const keys = new Set(wanted.map(([key]) => key));
  for (const [key, child] of there) if (!keys.has(key)) child.remove();
  let next = parent.firstElementChild;
  for (const [key, item] of wanted) {
    let child = there.get(key);
    if (child === undefined) {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === next) next = next.nextElementSibling;
    else parent.insertBefore(child, next);
    update(child, item);
  }
}

/** Update an element from a list of sentences, with one child `li` for each. */
export function bringTexts(parent, texts) {
  const numbered = texts.map((text, number) => ({ text, number }));
  bring(parent, numbered, (each) => each.number, () => make("li"), (child, each) => say(child, each.text));
}
