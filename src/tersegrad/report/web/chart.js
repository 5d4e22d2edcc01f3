"use strict";
// Figures as SVG: axes, lines and marks, redrawn at the width that there is, and told about under the pointer.
const Chart = (function () {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4", "4 2 1 2 1 2", "3 6"];
  const MARKS = ["circle", "square", "diamond", "up", "down", "cross"];
  const COLORS = 10;  // of the style sheet
  const LEFT = 72, RIGHT = 14, TOP = 12, BOTTOM = 46;  // margins
  const NEAR = 30;  // pixels from the pointer to a point that is told about

  function make(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  const color = (k) => "var(--c" + (k % COLORS) + ")";
  const dash = (k) => DASHES[k % DASHES.length];

  function marker(parent, k, x, y, filled) {
    const r = 4.6, s = 1.25 * r;
    const paths = {
      square: `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
      diamond: `M${x} ${y - s}L${x + s} ${y}L${x} ${y + s}L${x - s} ${y}z`,
      up: `M${x} ${y - s}L${x + s} ${y + r}H${x - s}z`,
      down: `M${x} ${y + s}L${x + s} ${y - r}H${x - s}z`,
      cross: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`,
    };
    const look = { fill: filled ? color(k) : "var(--ground)", stroke: color(k), "stroke-width": 1.6, class: "point" };
    const shape = MARKS[k % MARKS.length];
    if (shape === "circle") make(parent, "circle", { cx: x, cy: y, r: r, ...look });
    else make(parent, "path", { d: paths[shape], ...look });
  }

  function sample(parent, k, width, marked) {
    const svg = make(parent, "svg", { width: width, height: 14, "aria-hidden": "true" });
    const line = { x1: 1, x2: width - 1, y1: 7, y2: 7, stroke: color(k), "stroke-width": 2, "stroke-dasharray": dash(k) };
    make(svg, "line", line);
    if (marked) marker(svg, k, width / 2, 7, true);
  }

  // ------------------------------------------------------------------------------------------------------------- numbers

  function number(v, digits = 3) {
    if (v === null || v === undefined || !isFinite(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size < 1e6 && size >= 1e-4) return String(Number(v.toPrecision(digits)));
    return v.toExponential(digits - 1).replace("e+", "e").replace(/\.?0+e/, "e");
  }

  function ticks(low, high, log, most) {
    if (!log) {
      const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw)), out = [];
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
      for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step) {
        out.push(Math.abs(v) < step / 1e6 ? 0 : v);
      }
      return out;
    }
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / most)), powers = [], fine = [];
    for (let k = first; k <= last; k += every) powers.push(10 ** k);
    for (let k = first - 1; k <= last + 1; k++) for (const m of [1, 2, 5]) fine.push(m * 10 ** k);
    return powers.length >= 2 ? powers : fine.filter((v) => v >= low * 0.999 && v <= high * 1.001);
  }

  // Where an axis begins and ends: {log, low, high, zero} and the values that it must hold.
  function span(axis, values) {
    let low = axis.low ?? Math.min(...values), high = axis.high ?? Math.max(...values);
    if (axis.log) {
      if (low === high) [low, high] = [low / 2, high * 2];
      const margin = (high / low) ** 0.05;
      return [axis.low ?? low / margin, axis.high ?? high * margin];
    }
    if (axis.zero) low = Math.min(0, low);
    if (low === high) [low, high] = [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
    const margin = 0.05 * (high - low);
    return [axis.zero && low === 0 ? 0 : low - margin, high + margin];
  }

  // ------------------------------------------------------------------------------------------------------------- drawing

  function scale(axis, values, from, to) {
    const [low, high] = span(axis, values);
    const share = (v) => (axis.log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low));
    return { low: low, high: high, at: (v) => from + share(v) * (to - from) };
  }

  const path = (points, x, y) => points.map((p, k) => (k ? "L" : "M") + x(p[0]).toFixed(1) + " " + y(p[1]).toFixed(1)).join("");

  function axes(svg, spec, x, y, width, height) {
    const right = width - RIGHT, bottom = height - BOTTOM;
    for (const v of spec.x.ticks || ticks(x.low, x.high, spec.x.log, Math.max(3, Math.floor(width / 110)))) {
      if (v < x.low || v > x.high) continue;
      make(svg, "line", { x1: x.at(v), x2: x.at(v), y1: TOP, y2: bottom, class: "grid" });
      make(svg, "text", { x: x.at(v), y: bottom + 17, "text-anchor": "middle", class: "tick" }, (spec.x.text || number)(v));
    }
    for (const v of spec.y.ticks || ticks(y.low, y.high, spec.y.log, 6)) {
      if (v < y.low || v > y.high) continue;
      make(svg, "line", { x1: LEFT, x2: right, y1: y.at(v), y2: y.at(v), class: "grid" });
      make(svg, "text", { x: LEFT - 6, y: y.at(v) + 4, "text-anchor": "end", class: "tick" }, (spec.y.text || number)(v));
    }
    make(svg, "rect", { x: LEFT, y: TOP, width: right - LEFT, height: bottom - TOP, class: "frame" });
    make(svg, "text", { x: (LEFT + right) / 2, y: height - 8, "text-anchor": "middle" }, spec.x.name);
    const turned = `translate(13 ${(TOP + bottom) / 2}) rotate(-90)`;
    make(svg, "text", { x: 0, y: 0, transform: turned, "text-anchor": "middle" }, spec.y.name);
  }

  function series(inside, one, x, y) {
    const group = make(inside, "g", { class: "series", "data-name": one.name });
    const paint = one.still ? "var(--text)" : color(one.number);
    if (one.line) {
      const look = { fill: "none", stroke: paint, "stroke-width": one.width || 1.9, "stroke-linejoin": "round" };
      make(group, "path", { d: path(one.points, x.at, y.at), "stroke-dasharray": one.dash ?? dash(one.number), ...look });
    }
    if (one.marks || (one.line && one.points.length === 1)) {
      for (const p of one.points) marker(group, one.number, x.at(p[0]), y.at(p[1]), one.filled !== false);
    }
    return one.points.map((p) => [x.at(p[0]), y.at(p[1]), one.name + (p[2] ? "\n" + p[2] : "")]);
  }

  // spec: {label, empty, x, y, series: [{name, number, points: [[x, y, words]], line, marks, dash, still}], area, mark, measured: [x, words]};
  // a series that is "still" is no run: it does not widen the axes.
  function draw(host, spec) {
    const width = Math.max(280, Math.min(host.clientWidth || 800, 1100));
    const height = Math.round(Math.max(260, Math.min(460, width * 0.55)));
    host.textContent = "";
    host.points = [];
    host.scale = width;
    const svg = make(host, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label });
    const fits = (v, axis) => v !== null && v !== undefined && isFinite(v) && (!axis.log || v > 0);
    const usable = (p) => fits(p[0], spec.x) && fits(p[1], spec.y);
    const shown = spec.series.map((s) => ({ ...s, points: s.points.filter(usable) })).filter((s) => s.points.length);
    const all = shown.filter((s) => !s.still).flatMap((s) => s.points);
    if (!all.length) {
      const words = spec.empty || "nothing was recorded";
      make(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, words);
      return;
    }
    const x = scale(spec.x, all.map((p) => p[0]), LEFT, width - RIGHT);
    const y = scale(spec.y, all.map((p) => p[1]), height - BOTTOM, TOP);
    axes(svg, spec, x, y, width, height);
    const clip = make(make(svg, "defs", {}), "clipPath", { id: host.id + "-clip" });
    make(clip, "rect", { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: height - TOP - BOTTOM });
    const inside = make(svg, "g", { "clip-path": `url(#${host.id}-clip)` });
    if (spec.area) {
      const edge = path(spec.area.map((p) => [p[0], Math.max(p[1], y.low)]), x.at, y.at);
      make(inside, "path", { d: `${edge}L${x.at(x.high)} ${y.at(y.low)}L${x.at(x.low)} ${y.at(y.low)}z`, fill: "var(--shade)" });
    }
    if (spec.mark) {
      const line = { x1: x.at(spec.mark), x2: x.at(spec.mark), y1: TOP, y2: height - BOTTOM, class: "mark" };
      make(inside, "line", { stroke: "var(--soft)", "stroke-width": 1.5, "stroke-dasharray": "3 3", ...line });
    }
    if (spec.measured) {
      const [value, words] = spec.measured, at = x.at(value), right = at < width / 2;
      make(inside, "line", { x1: at, x2: at, y1: TOP, y2: height - BOTTOM, class: "measured", stroke: "currentColor", "stroke-width": 1 });
      const place = { x: at + (right ? 5 : -5), y: TOP + 15, "text-anchor": right ? "start" : "end" };
      make(inside, "text", { ...place, class: "measured" }, words);
    }
    host.points = shown.flatMap((one) => series(inside, one, x, y));
  }

  function tell(host, tip, event) {
    const box = host.getBoundingClientRect(), ratio = (host.scale || box.width) / box.width;
    const x = (event.clientX - box.left) * ratio, y = (event.clientY - box.top) * ratio;
    const far = (p) => (p[0] - x) ** 2 + (p[1] - y) ** 2;
    const best = (host.points || []).reduce((a, b) => (a && far(a) <= far(b) ? a : b), null);
    tip.hidden = !best || far(best) > NEAR ** 2;
    if (tip.hidden) return;
    tip.textContent = best[2];
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)) + "px";
    const below = event.clientY + 18, above = Math.max(4, event.clientY - tip.offsetHeight - 12);
    tip.style.top = (below + tip.offsetHeight > innerHeight ? above : below) + "px";
  }

  // A figure in an element: draws what build() describes, and returns the function that draws it again.
  function figure(host, tip, build) {
    const again = () => draw(host, build());
    for (const kind of ["pointermove", "pointerdown"]) host.addEventListener(kind, (event) => tell(host, tip, event));
    host.addEventListener("pointerleave", () => { tip.hidden = true; });
    again();
    return again;
  }

  return { figure: figure, number: number, sample: sample };
})();
