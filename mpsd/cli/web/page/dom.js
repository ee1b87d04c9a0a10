/* Elements: made, and brought to what they are to show. Text is set as text; nothing here makes HTML of it. */

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

/** Give an element this text, unless it has it: a screen reader reads what changes. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Give an element this attribute, unless it has it. */
export function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/**
 * Bring the children of an element to a list of items: one child for each, by its key, in their order.
 * A child that stays is updated and not made anew, so that it keeps its focus; `update` gets the child and the item.
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

/** Bring an element to a list of sentences, one child `li` each. */
export function bringTexts(parent, texts) {
  const numbered = texts.map((text, number) => ({ text, number }));
  bring(parent, numbered, (each) => each.number, () => make("li"), (child, each) => say(child, each.text));
}
