// Elements of the page. Text is always set as text, never as markup, because models may generate markup.

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#1f77b4", "#d9652b", "#2d9d5f", "#9a5bc0", "#c2486f", "#8a6d3b", "#2aa3a8", "#5b6574"];

export const colourOf = number => COLOURS[number % COLOURS.length];

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [property, set] of Object.entries(value)) element.style.setProperty(property, set);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

export async function api(name, parameters = {}) {
  const answer = await fetch(`api/${name}?${new URLSearchParams(parameters)}`);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// Markdown of the explanations, which has only `code`.
export const marked = text => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

export function choice(label, options, value, change) {
  const select = el("select", { onchange: event => change(event.target.value) },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text)));
  return el("label", {}, `${label} `, select);
}

export function search(label, value, change) {
  return el("input", { type: "search", placeholder: label, "aria-label": label, value,
    oninput: event => change(event.target.value) });
}

export function tick(label, checked, change) {
  return el("label", {}, el("input", { type: "checkbox", checked, onchange: event => change(event.target.checked) }),
    ` ${label}`);
}
