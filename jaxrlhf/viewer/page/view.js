// The page: the selected runs, the tabs, and updates while a run trains.

import { chart } from "./chart.js";
import { api, colourOf, el, marked, search, tick } from "./page.js";
import { showEvaluation, showSamples } from "./samples.js";
import { showTimeline } from "./timeline.js";

const EVERY_MS = 2000;
const main = document.getElementById("main");
const view = { runs: [], chosen: new Set(), tab: "Metrics", records: new Map(), explanations: [], follow: true, asked: 0 };
const metrics = { text: "", smoothing: 0, zoom: null, explained: false };
const settings = { text: "", differing: true };
const TABS = { Metrics: showMetrics, Samples: tab(showSamples), Evaluation: tab(showEvaluation),
  Timeline: tab(showTimeline), Settings: showSettings };

// A tab is shown when it is loaded, unless another tab was selected meanwhile.
function tab(show) {
  return async () => {
    const place = el("div"), asked = view.asked;
    await show(place, chosenRuns());
    if (asked === view.asked) main.replaceChildren(place);
  };
}
const chosenRuns = () => view.runs.filter(run => view.chosen.has(run.run) && !run.unreadable);
const colour = run => colourOf(view.runs.findIndex(one => one.run === run));

async function start() {
  view.explanations = (await api("explanations")).map(row => ({ ...row, pattern: new RegExp(row.pattern) }));
  await look();
  const readable = view.runs.filter(run => !run.unreadable);
  readable.filter(run => !run.run.endsWith("cold_start")).slice(0, 4).forEach(run => view.chosen.add(run.run));
  if (!view.chosen.size) readable.slice(0, 1).forEach(run => view.chosen.add(run.run));
  await show();
  setInterval(() => view.follow && look(true).catch(failed), EVERY_MS);
}

// Read the list of runs; if a selected run has new records, show them.
async function look(follow = false) {
  const { root, runs } = await api("runs");
  const before = new Map(view.runs.map(run => [run.run, run]));
  const changed = runs.filter(run => before.get(run.run)?.changed !== run.changed);
  view.runs = runs;
  const state = document.getElementById("state");
  state.textContent = `${root.split("/").at(-1)} · ${runs.length} runs`;
  state.title = root;
  if (!changed.length && before.size === runs.length) return;
  listRuns();
  if (follow && view.tab === "Metrics" && changed.some(run => view.chosen.has(run.run))) await show();
}

function listRuns() {
  document.getElementById("runs").replaceChildren(
    ...view.runs.map(run => el("label", { title: run.run },
      el("input", { type: "checkbox", value: run.run, checked: view.chosen.has(run.run), onchange: event => {
        view.chosen[event.target.checked ? "add" : "delete"](run.run);
        show();
      } }), " ", el("span", { style: { color: colour(run.run) } }, "■ "), run.run,
      el("small", {}, run.unreadable ? ` ${run.unreadable}` : ` step ${run.last_step}`))),
    el("p", {}, tick("follow", view.follow, follow => { view.follow = follow; })));
}

async function show() {
  view.asked++;
  document.getElementById("tabs").replaceChildren(...Object.keys(TABS).map(name => el("button",
    { "aria-selected": name === view.tab, role: "tab", onclick: () => { view.tab = name; show(); } }, name)));
  listRuns();
  if (!view.runs.length) return main.replaceChildren(el("p", { class: "empty" }, "There are no runs in this folder yet."));
  await Promise.resolve(TABS[view.tab]()).catch(failed);
}

function failed(error) { document.getElementById("state").textContent = String(error.message ?? error); }

// Records of a run: new records are added; a run that was resumed from an earlier step is read again.
async function recordsOf(run) {
  const known = view.records.get(run) ?? [];
  const after = known.length ? known.at(-1).step : -Infinity;
  const answer = known.length ? await api("metrics", { run, after }) : await api("metrics", { run });
  const whole = answer.before === known.length ? [...known, ...answer.records] : (await api("metrics", { run })).records;
  view.records.set(run, whole);
  return whole;
}

async function showMetrics() {
  const shown = [], asked = view.asked;
  for (const run of chosenRuns()) shown.push([run.run, await recordsOf(run.run)]);
  if (asked !== view.asked) return;
  const lines = new Map();
  for (const [run, records] of shown) for (const record of records) for (const [name, value] of Object.entries(record)) {
    if (name === "step" || value === null) continue;
    if (!lines.has(name)) lines.set(name, new Map());
    if (!lines.get(name).has(run)) lines.get(name).set(run, []);
    lines.get(name).get(run).push([record.step, value]);
  }
  const place = el("div", { class: "cards" });
  const fill = () => place.replaceChildren(...[...lines.keys()].sort(byImportance).filter(name =>
    name.toLowerCase().includes(metrics.text.toLowerCase())).map(name => card(name, lines.get(name), fill)));
  if (main.firstChild?.dataset?.tab === "Metrics") main.lastChild.replaceWith(place);
  else main.replaceChildren(el("div", { class: "controls", "data-tab": "Metrics" },
    search("search metrics", metrics.text, text => { metrics.text = text; metrics.fill(); }),
    el("label", {}, "smoothing ", el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: metrics.smoothing,
      id: "smoothing", oninput: event => { metrics.smoothing = Number(event.target.value); metrics.fill(); } })),
    tick("explain", metrics.explained, explained => { metrics.explained = explained; metrics.fill(); }),
    el("button", { onclick: () => { metrics.zoom = null; metrics.fill(); } }, "all steps"),
    el("span", { class: "facts" }, "drag to zoom, double-click for all")), place);
  metrics.fill = fill;
  fill();
}

const FIRST = ["eval/accuracy", "score/mean", "preference/accuracy", "response/length_mean", "kl/ref", "policy/entropy",
  "policy/clip_fraction", "sampler/logp_gap_mean", "actor/grad_norm", "time/step_s"];
const rank = name => FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length;
const byImportance = (a, b) => rank(a) - rank(b) || a.localeCompare(b);

function card(name, byRun, fill) {
  const drawn = [...byRun.entries()].map(([run, points]) => ({ label: run, colour: colour(run), points }));
  const explained = view.explanations.find(row => row.pattern.test(name));
  const options = { smoothing: metrics.smoothing, zoom: metrics.zoom, onzoom: zoom => { metrics.zoom = zoom; fill(); } };
  const words = explained && [el("p", {}, marked(explained.meaning)),
    explained.healthy ? el("p", {}, el("b", {}, "healthy: "), marked(explained.healthy)) : null,
    explained.otherwise ? el("p", {}, el("b", {}, "if not: "), marked(explained.otherwise)) : null];
  return el("section", { class: "card", "data-metric": name }, el("h3", {}, name), chart(drawn, options),
    explained ? el("details", { open: metrics.explained }, el("summary", {}, "meaning"), words)
      : el("p", { class: "empty" }, "a metric of your own"));
}

async function showSettings() {
  const runs = chosenRuns().map(run => run.run), asked = view.asked;
  const all = await Promise.all(runs.map(run => api("settings", { run }).catch(error => ({ unreadable: error.message }))));
  if (asked !== view.asked) return;
  const names = [...new Set(all.flatMap(one => Object.keys(one)))];
  const place = el("div", {});
  const differs = name => new Set(all.map(one => JSON.stringify(one[name]))).size > 1;
  const fill = () => {
    const kept = names.filter(name => name.includes(settings.text) && (!settings.differing || all.length < 2 || differs(name)));
    place.replaceChildren(el("table", { id: "settings" },
      el("tr", {}, el("th", {}, "setting"), runs.map(run => el("th", {}, run))),
      kept.map(name => el("tr", { class: differs(name) ? "differs" : "" }, el("td", {}, name),
        all.map(one => el("td", {}, name in one ? JSON.stringify(one[name]) : "–"))))),
      kept.length ? "" : el("p", { class: "empty" }, "The settings of these runs are the same."));
  };
  main.replaceChildren(el("div", { class: "controls" },
    search("search settings", settings.text, text => { settings.text = text; fill(); }),
    tick("differences only", settings.differing, differing => { settings.differing = differing; fill(); })), place);
  fill();
}

start().catch(failed);
