// A chart of lines over steps: drag to zoom, double-click for all, hover for values.

import { el, short, svg } from "./page.js";

const WIDTH = 360, HEIGHT = 170, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 20;

// Exponential moving average, corrected for its bias to 0 at the start.
export function smoothed(points, weight) {
  let sum = 0, total = 0;
  return points.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return [x, sum / total];
  });
}

// lines: [{label, colour, points: [[x, y], ...]}]; zoom: [from, to] or null.
export function chart(lines, { smoothing, zoom, onzoom }) {
  const inside = ([x]) => !zoom || (x >= zoom[0] && x <= zoom[1]);
  const drawn = lines.map(line => ({ ...line, raw: line.points.filter(inside),
    points: smoothed(line.points, smoothing).filter(inside) }));
  const all = drawn.flatMap(line => [...line.points, ...(smoothing ? [] : line.raw)]);
  const [x0, x1] = zoom ?? extent(all.map(([x]) => x));
  const [y0, y1] = extent(all.map(([, y]) => y), 0.05);
  const px = x => LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT);
  const py = y => HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM);
  const path = points => points.map(([x, y], i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (const share of [0, 0.5, 1]) {
    const y = y0 + share * (y1 - y0), x = x0 + share * (x1 - x0);
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: py(y), y2: py(y) }),
      svg("text", { x: LEFT - 4, y: py(y) + 3, "text-anchor": "end" }, short(y)),
      svg("text", { x: px(x), y: HEIGHT - 6, "text-anchor": ["start", "middle", "end"][2 * share] }, short(Math.round(x))));
  }
  for (const line of drawn) {
    if (smoothing) picture.append(svg("path", { d: path(line.raw), fill: "none", stroke: line.colour, opacity: 0.25 }));
    picture.append(svg("path", { class: "line", d: path(line.points), fill: "none", stroke: line.colour, "stroke-width": 1.6 }));
    if (line.points.length === 1) picture.append(svg("circle", { cx: px(line.points[0][0]), cy: py(line.points[0][1]), r: 2.5, fill: line.colour }));
  }
  const values = el("div", { class: "values" });
  const stepAt = event => {
    const box = picture.getBoundingClientRect();
    return x0 + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (x1 - x0);
  };
  let from = null, band = null;
  picture.addEventListener("pointerdown", event => {
    from = stepAt(event);
    band = svg("rect", { class: "zoom", y: TOP, height: HEIGHT - TOP - BOTTOM, x: px(from), width: 0 });
    picture.append(band);
  });
  picture.addEventListener("pointermove", event => {
    const at = stepAt(event);
    if (band) {
      band.setAttribute("x", Math.min(px(from), px(at)));
      band.setAttribute("width", Math.abs(px(at) - px(from)));
    }
    values.replaceChildren(...drawn.filter(line => line.raw.length).map(line => {
      const [x, y] = line.raw.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
      return el("div", { style: { color: line.colour } }, `${line.label} · step ${x}: ${short(y)}`);
    }));
  });
  picture.addEventListener("pointerup", event => {
    const to = stepAt(event), start = from;
    from = null;
    band?.remove();
    band = null;
    if (start !== null && Math.abs(px(to) - px(start)) > 8) onzoom([Math.min(start, to), Math.max(start, to)]);
  });
  picture.addEventListener("pointerleave", () => { band?.remove(); band = from = null; });
  picture.addEventListener("dblclick", () => onzoom(null));
  return [picture, values];
}

export function extent(numbers, margin = 0) {
  if (!numbers.length) return [0, 1];
  let low = Infinity, high = -Infinity;
  for (const number of numbers) { low = Math.min(low, number); high = Math.max(high, number); }
  const more = low === high ? Math.abs(low) * 0.1 || 0.5 : margin * (high - low);
  return [low - more, high + more];
}
