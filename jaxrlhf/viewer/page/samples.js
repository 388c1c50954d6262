// Samples of a step as conversations, with the responses to one prompt side by side; answers to held-out problems over steps.

import { api, choice, el, search, short, tick } from "./page.js";
import { COLOURINGS, coloured, has, legend } from "./tokens.js";

const look = { run: null, step: null, text: "", outcome: "all", truncated: false, order: "prompt", colour: "" };
const asked = { run: null, text: "", open: null };
const GROUPS = 30, COLUMNS = 12, PROBLEMS = 200;

export async function showSamples(main, runs) {
  const able = runs.filter(run => run.has.includes("samples"));
  if (!able.length) return main.replaceChildren(el("p", { class: "empty" }, "The selected runs have no samples."));
  if (!able.some(run => run.run === look.run)) Object.assign(look, { run: able[0].run, step: null });
  const steps = Object.keys(await api("steps", { run: look.run, kind: "samples" })).map(Number);
  if (!steps.length) return main.replaceChildren(el("p", { class: "empty" }, "This run has no samples yet."));
  if (!steps.includes(look.step)) look.step = steps.at(-1);
  const { run, step } = look;
  const samples = await api("samples", { run, kind: "samples", step });
  if (run !== look.run || step !== look.step) return showSamples(main, runs);  // another was selected meanwhile
  const again = change => value => { Object.assign(look, change(value)); showSamples(main, runs); };
  const list = el("div", { id: "samples" });
  const fill = () => list.replaceChildren(...groups(samples));
  main.replaceChildren(el("div", { class: "controls" },
    choice("run", able.map(run => [run.run, run.run]), look.run, again(run => ({ run }))),
    choice("step", steps.map(step => [step, step]), look.step, again(step => ({ step: Number(step) }))),
    search("search in prompts and responses", look.text, text => { look.text = text; fill(); }),
    choice("score", [["all", "all"], ["good", "above 0"], ["bad", "0 or less"], ["none", "unscorable"]], look.outcome,
      outcome => { look.outcome = outcome; fill(); }),
    choice("order", [["prompt", "as generated"], ["spread", "spread of the group"], ["gap", "largest gap"]], look.order,
      order => { look.order = order; fill(); }),
    choice("tokens", COLOURINGS, look.colour, colour => { look.colour = colour; fill(); }),
    tick("truncated only", look.truncated, truncated => { look.truncated = truncated; fill(); }),
  ), list);
  fill();
}

function groups(samples) {
  const byPrompt = new Map();
  for (const sample of samples) byPrompt.set(sample.prompt, [...(byPrompt.get(sample.prompt) ?? []), sample]);
  let found = [...byPrompt.entries()].map(([prompt, all]) => ({ prompt, all, shown: all.filter(matches) }));
  found = found.filter(group => group.shown.length);
  if (look.order === "spread") found.sort((a, b) => spread(b.all) - spread(a.all));
  if (look.order === "gap") found.sort((a, b) => gap(b.shown) - gap(a.shown));
  const count = found.reduce((sum, group) => sum + group.shown.length, 0);
  const more = found.length > GROUPS ? `; the first ${GROUPS} prompts are shown` : "";
  return [el("p", { class: "facts", id: "count" }, `${count} of ${samples.length} responses to ${found.length} prompts${more}`),
    ...(look.colour ? [colours(samples)] : []),
    ...found.slice(0, GROUPS).map(group => el("section", { class: "group" },
      el("div", { class: "facts" }, `answer ${short(group.all[0].answer)} · mean score ${short(mean(group.all))} · spread ${short(spread(group.all))}`),
      group.all[0].episode ? null : message("prompt", group.prompt),
      el("div", { class: "side" }, group.shown.map(sample => answer(sample, mean(group.all))))))];
}

function colours(samples) {
  if (samples.some(sample => has(sample, look.colour))) return legend(look.colour);
  return el("p", { class: "empty", id: "legend" }, "No response of this step has these numbers. token_records.responses sets how many responses have " +
    "log-probabilities, token_records.entropy=True adds entropies, and the gap is recorded if the trainer computes old log-probabilities.");
}

const scores = samples => samples.map(sample => sample.score).filter(score => score !== null);
const gap = samples => Math.max(...samples.map(sample => sample.logp_gap ?? 0));

function mean(samples) {
  const known = scores(samples);
  return known.length ? known.reduce((sum, score) => sum + score, 0) / known.length : null;
}

function spread(samples) {
  const centre = mean(samples), known = scores(samples);
  return known.length ? Math.sqrt(known.reduce((sum, score) => sum + (score - centre) ** 2, 0) / known.length) : 0;
}

const outcome = sample => sample.score === null ? "none" : sample.score > 0 ? "good" : "bad";

function matches(sample) {
  const text = look.text.toLowerCase();
  const said = `${sample.prompt}\n${sample.response}\n${sample.episode ? JSON.stringify(sample.episode.messages) : ""}`;
  return (look.outcome === "all" || look.outcome === outcome(sample)) && (!look.truncated || sample.truncated)
    && (!text || said.toLowerCase().includes(text));
}

function answer(sample, centre) {
  const parts = Object.entries(sample.parts).map(([name, score]) => `${name} ${short(score)}`);
  const above = sample.score === null || centre === null ? null : `above the group's mean ${short(sample.score - centre)}`;
  const gapped = sample.logp_gap === null ? null : `sampler gap ${short(sample.logp_gap)}`;
  const facts = [`score ${short(sample.score)}`, ...parts, above, `${sample.response_length} tokens`,
    sample.truncated ? "truncated" : null, gapped].filter(Boolean);
  const said = sample.episode
    ? [...sample.episode.messages.map(one => message(one.role, spoken(one))),
      el("div", { class: "facts" }, `ended: ${sample.episode.stop}${sample.episode.failure ? ` (${sample.episode.failure})` : ""}`)]
    : has(sample, look.colour) ? null : message("assistant", sample.response);
  const tokens = has(sample, look.colour) ? el("div", { class: "message assistant" },
    el("span", { class: "role" }, "assistant, token by token"), coloured(sample.tokens, look.colour)) : null;
  return el("article", { class: `answer ${outcome(sample)}` }, el("div", { class: "facts" }, facts.join(" · ")), said, tokens);
}

function spoken(one) {
  const calls = (Array.isArray(one.tool_calls) ? one.tool_calls : []).map(call => call?.function?.name
    ? `${call.function.name}(${JSON.stringify(call.function.arguments)})` : JSON.stringify(call));
  const thought = one.reasoning_content ? [`<think>${one.reasoning_content}</think>`] : [];
  const content = typeof one.content === "string" ? one.content : one.content ? JSON.stringify(one.content) : "";
  return [...thought, content, ...calls].filter(Boolean).join("\n");
}

const message = (role, content) =>
  el("div", { class: `message ${role}` }, el("span", { class: "role" }, role), content);

export async function showEvaluation(main, runs) {
  const able = runs.filter(run => run.has.includes("evaluation"));
  if (!able.length) return main.replaceChildren(el("p", { class: "empty" }, "The selected runs have no answers to held-out problems."));
  if (!able.some(run => run.run === asked.run)) asked.run = able[0].run;
  const { run } = asked;
  const every = Object.keys(await api("steps", { run, kind: "evaluation" })).map(Number);
  const stride = Math.max(1, Math.ceil(every.length / COLUMNS));
  const steps = every.filter((_, i) => (every.length - 1 - i) % stride === 0);
  const answers = await Promise.all(steps.map(step => api("samples", { run, kind: "evaluation", step })));
  if (run !== asked.run) return showEvaluation(main, runs);
  const problems = new Map();
  answers.forEach((samples, column) => samples.forEach(sample => {
    if (!problems.has(sample.prompt)) problems.set(sample.prompt, []);
    problems.get(sample.prompt)[column] ??= sample;
  }));
  const place = el("div", {});
  const fill = () => {
    const rows = [...problems.entries()].filter(([prompt]) => prompt.toLowerCase().includes(asked.text.toLowerCase()));
    place.replaceChildren(el("table", { id: "evaluation" },
      el("tr", {}, el("th", {}, "problem"), el("th", {}, "answer"), steps.map(step => el("th", {}, `step ${step}`))),
      rows.slice(0, PROBLEMS).flatMap(([prompt, samples]) => {
        const row = el("tr", {}, el("td", {}, prompt.slice(0, 160)), el("td", {}, short(samples.find(Boolean).answer)),
          steps.map((_, column) => cell(samples[column], () => { asked.open = asked.open === prompt ? null : prompt; fill(); })));
        const open = asked.open === prompt ? el("tr", {}, el("td", { colspan: steps.length + 2 }, el("div", { class: "side" },
          samples.map((sample, column) => el("div", {}, el("b", {}, `step ${steps[column]}`), answer(sample, null)))))) : null;
        return [row, open];
      })));
  };
  main.replaceChildren(el("div", { class: "controls" },
    choice("run", able.map(run => [run.run, run.run]), asked.run, run => { asked.run = run; showEvaluation(main, runs); }),
    search("search in problems", asked.text, text => { asked.text = text; fill(); }),
    el("span", { class: "facts" }, "click a score to see the answers")), place);
  fill();
}

function cell(sample, open) {
  if (!sample) return el("td", {}, "");
  const shade = { good: "#d5f0e0", bad: "#fadcdc", none: "#fff0c2" }[outcome(sample)];
  return el("td", { class: "score", style: { background: shade }, onclick: open }, short(sample.score));
}
