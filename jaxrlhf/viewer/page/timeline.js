// Timeline of the roles' calls: drag to zoom, double-click for all, hover for seconds.

import { api, choice, colourOf, el, short, svg } from "./page.js";

const WIDTH = 1200, LEFT = 110, LANE = 26, AXIS = 22;
const times = { run: null, zoom: null };

export async function showTimeline(main, runs) {
  if (!runs.length) return main.replaceChildren(el("p", { class: "empty" }, "Select a run."));
  if (!runs.some(run => run.run === times.run)) Object.assign(times, { run: runs[0].run, zoom: null });
  const { run } = times;
  const calls = await api("timeline", { run });
  if (run !== times.run) return showTimeline(main, runs);
  const place = el("div", { class: "card" });
  const fill = () => place.replaceChildren(...drawn(calls, zoom => { times.zoom = zoom; fill(); }));
  main.replaceChildren(el("div", { class: "controls" },
    choice("run", runs.map(run => [run.run, run.run]), times.run, run => {
      Object.assign(times, { run, zoom: null });
      showTimeline(main, runs);
    }),
    el("button", { onclick: () => { times.zoom = null; fill(); } }, "all"),
    el("span", { class: "facts" }, `${calls.length} calls; drag to zoom, double-click for all`)), place);
  fill();
}

function drawn(calls, zoomTo) {
  if (!calls.length) return [el("p", { class: "empty" }, "This run has no calls yet.")];
  const begin = calls.reduce((least, call) => Math.min(least, call.start_s), Infinity);
  const end = calls.reduce((most, call) => Math.max(most, call.start_s + call.length_s), -Infinity);
  const [from, to] = times.zoom ?? [0, end - begin];
  const roles = [...new Set(calls.map(call => call.role))], verbs = [...new Set(calls.map(call => call.verb))];
  const height = roles.length * LANE + AXIS;
  const px = seconds => LEFT + (seconds - from) / (to - from) * (WIDTH - LEFT);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, id: "timeline" });
  const values = el("div", { class: "values" });
  for (const call of calls) {
    const start = call.start_s - begin, left = Math.max(px(start), LEFT), right = Math.min(px(start + call.length_s), WIDTH);
    if (right < LEFT || left > WIDTH) continue;
    const y = roles.indexOf(call.role) * LANE + 3;
    picture.append(svg("rect", { x: left, y, width: Math.max(right - left, 0.6), height: LANE - 6, class: "call",
      fill: colourOf(verbs.indexOf(call.verb)), onpointermove: () => {
        values.textContent = `${call.role}.${call.verb}: ${short(call.length_s)} s, from ${short(start)} s`;
      } }));
  }
  roles.forEach((role, lane) => picture.append(svg("text", { x: 0, y: lane * LANE + 17 }, role)));
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    picture.append(svg("text", { x: px(from + share * (to - from)), y: height - 6, "text-anchor": anchor }, `${short(from + share * (to - from))} s`));
  }
  const at = event => {
    const box = picture.getBoundingClientRect();
    return from + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT) * (to - from);
  };
  let held = null;
  picture.addEventListener("pointerdown", event => { held = at(event); });
  picture.addEventListener("pointerup", event => {
    const until = at(event), since = held;
    held = null;
    if (since !== null && Math.abs(px(until) - px(since)) > 8) zoomTo([Math.min(since, until), Math.max(since, until)]);
  });
  picture.addEventListener("dblclick", () => zoomTo(null));
  const legend = el("div", { class: "facts" }, verbs.map((verb, i) => el("span", {}, el("span", { style: { color: colourOf(i) } }, "■ "), `${verb}  `)));
  return [picture, values, legend];
}
