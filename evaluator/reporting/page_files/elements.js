// Helpers that build elements. Names are untrusted: elements are created one by one, and text is only set as text.

// As Python rounds what is not negative: a tie, which has a finite binary fraction, to the even digit. toFixed takes ties up.
const rounded = (value, digits) => (value - ((value * 2 ** (digits + 1)) % 4 === 1 ? 10 ** -(digits + 2) : 0)).toFixed(digits);
const decimal = (value, digits = 1) => (value === null ? "–" : rounded(value, digits));
const integer = (value) => value.toLocaleString("en");
const rankText = (rank) => (rank === null ? "–" : Number.isInteger(rank) ? integer(rank) : rank.toFixed(1));
const signed = (value, digits = 1) => {
  const text = rounded(Math.abs(value), digits);
  return Number(text) === 0 ? text : `${value < 0 ? "−" : "+"}${text}`;
};

/** Create an element. tag: with CSS classes after dots, as in `td.number`; attributes: by name. */
function make(tag, attributes, ...children) {
  const [name, ...names] = tag.split(".");
  const element = document.createElement(name);
  if (names.length) element.className = names.join(" ");
  for (const [key, value] of Object.entries(attributes ?? {})) element.setAttribute(key, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
