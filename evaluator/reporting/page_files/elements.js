// What the scripts of a page build elements with. Names are hostile: elements are made one by one, and text is only ever
// set as text.

const decimal = (value, digits = 1) => (value === null ? "–" : value.toFixed(digits));
const whole = (value) => value.toLocaleString("en");
const rankText = (rank) => (rank === null ? "–" : Number.isInteger(rank) ? whole(rank) : rank.toFixed(1));
const signed = (value, digits = 1) => {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
};

/** Makes an element. names: of its classes, after dots, as in `td.number`; attributes: `style` and others by name. */
function make(tag, attributes, ...children) {
  const [name, ...names] = tag.split(".");
  const element = document.createElement(name);
  if (names.length) element.className = names.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
