// The tokens of a response, each colored by one of its numbers.

import { el, short } from "./page.js";

// Colors of numbers: white at `from`, the full color at `to`, on a logarithmic scale if `log`.
const KINDS = {
  logp: { label: "log-probability", colour: "214, 69, 69", from: 0, to: -5, meaning: "0 is certain" },
  entropy: { label: "entropy", colour: "124, 77, 190", from: 0, to: 3, meaning: "0 is certain" },
  gap: { label: "sampler gap", colour: "217, 130, 0", from: 1e-6, to: 1, log: true, meaning: "trainer's minus sampler's" },
};

export const COLOURINGS = [["", "no colors"], ...Object.entries(KINDS).map(([kind, { label }]) => [kind, label])];

export const has = (sample, kind) => Boolean(sample.tokens?.[kind]);

// Share of the full color for a number, from 0 to 1.
function strength(kind, value) {
  const { from, to, log } = KINDS[kind];
  if (value === null) return 0;
  const share = log ? Math.log(Math.max(Math.abs(value), from) / from) / Math.log(to / from) : (value - from) / (to - from);
  return Math.min(Math.max(share, 0), 1);
}

const shade = (kind, share) => `rgba(${KINDS[kind].colour}, ${(0.75 * share).toFixed(3)})`;

export function coloured(tokens, kind) {
  return el("div", { class: "tokens" }, tokens.text.map((text, i) => el("span", {
    class: text ? "token" : "token silent",
    title: Object.keys(KINDS).filter(name => tokens[name]).map(name => `${KINDS[name].label} ${short(tokens[name][i])}`).join("\n"),
    style: { background: shade(kind, strength(kind, tokens[kind][i])) },
  }, text || "\u25aa")));
}

export function legend(kind) {
  const { label, from, to, meaning } = KINDS[kind];
  const shades = [0, 0.25, 0.5, 0.75, 1].map(share => el("span", { class: "token", style: { background: shade(kind, share) } }, "\u2003"));
  return el("p", { class: "facts", id: "legend" }, `${label} (${meaning}): ${short(from)} `, shades, ` ${short(to)} and beyond; \u25aa is a token without text`);
}
