"use strict";
// Draws the figures of the page from the JSON inside it. Texts of the data only ever become text nodes.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4", "4 2 1 2 1 2", "3 6"];
  const MARKS = ["circle", "square", "diamond", "up", "down", "cross"];
  const hidden = new Set();  // numbers of runs that are not shown
  const drawn = [];  // a function per figure, called again when the width or the choice of runs changes
  const many = 10;

  // ------------------------------------------------------------------------------------------------------------ elements

  function make(parent, name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  function element(parent, name, text, kind) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    parent.appendChild(node);
    return node;
  }

  const color = (k) => "var(--c" + (k % many) + ")";
  const dash = (k) => DASHES[k % DASHES.length];

  function marker(parent, shape, x, y, paint, filled) {
    const r = 4.6, at = { fill: filled ? paint : "var(--ground)", stroke: paint, "stroke-width": 1.6, class: "point" };
    const path = (d) => make(parent, "path", Object.assign({ d: d }, at));
    if (shape === "square") return path(`M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`);
    if (shape === "diamond") return path(`M${x} ${y - 1.3 * r}L${x + 1.3 * r} ${y}L${x} ${y + 1.3 * r}L${x - 1.3 * r} ${y}z`);
    if (shape === "up") return path(`M${x} ${y - 1.2 * r}L${x + 1.2 * r} ${y + r}H${x - 1.2 * r}z`);
    if (shape === "down") return path(`M${x} ${y + 1.2 * r}L${x + 1.2 * r} ${y - r}H${x - 1.2 * r}z`);
    if (shape === "cross") return path(`M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`);
    return make(parent, "circle", Object.assign({ cx: x, cy: y, r: r }, at));
  }

  // ------------------------------------------------------------------------------------------------------------- numbers

  function number(v, digits) {
    if (v === null || v === undefined || !isFinite(v)) return "–";
    if (v === 0) return "0";
    const size = Math.abs(v);
    if (size >= 1e6 || size < 1e-4) return v.toExponential(Math.max(0, (digits || 3) - 1)).replace("e+", "e").replace(/\.?0+e/, "e");
    return String(Number(v.toPrecision(digits || 3)));
  }

  function scaled(v, units) {
    for (const [size, unit] of units) if (Math.abs(v) >= size) return number(v / size) + " " + unit;
    const [size, unit] = units[units.length - 1];
    return number(v / size) + " " + unit;
  }

  const bytes = (v) => scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
  const rate = (v) => scaled(v, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]);
  const seconds = (v) => scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  const percent = (v) => number(100 * v, 4) + " %";

  function ticks(low, high, log, most) {
    const out = [];
    if (log) {
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const every = Math.max(1, Math.ceil((last - first + 1) / most));
      for (let k = first; k <= last; k += every) out.push(10 ** k);
      if (out.length >= 2) return out;
      out.length = 0;
      for (let k = first - 1; k <= last + 1; k++) for (const m of [1, 2, 5]) {
        const v = m * 10 ** k;
        if (v >= low * 0.999 && v <= high * 1.001) out.push(v);
      }
      return out;
    }
    const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) || raw;
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + 1e-9 * step; v += step) out.push(Math.abs(v) < step / 1e6 ? 0 : v);
    return out;
  }

  // -------------------------------------------------------------------------------------------------------------- figures

  // series: {name, number, points: [[x, y, words]], line, marks, dash, width, still}; "still" ones are not runs
  function figure(id, build) {
    const host = byId(id);
    host.tabIndex = 0;
    const draw = function () {
      const spec = build();
      const width = Math.max(280, Math.min(host.clientWidth || 800, 1100)), height = Math.round(Math.max(260, Math.min(460, width * 0.55)));
      const left = 72, right = 14, top = 12, bottom = 46;
      host.textContent = "";
      const svg = make(host, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label });
      const usable = (p, s) => p[1] !== null && p[0] !== null && isFinite(p[0]) && isFinite(p[1]) && (!spec.x.log || p[0] > 0) && (!spec.y.log || p[1] > 0);
      const shown = spec.series.map((s) => Object.assign({}, s, { points: s.points.filter((p) => usable(p, s)) })).filter((s) => s.points.length);
      const all = shown.filter((s) => !s.still).flatMap((s) => s.points);
      const span = (axis, values) => {
        let low = axis.low !== undefined ? axis.low : Math.min(...values), high = axis.high !== undefined ? axis.high : Math.max(...values);
        if (!axis.log && axis.zero) low = Math.min(0, low);
        if (axis.log) { if (low === high) { low /= 2; high *= 2; } const m = (high / low) ** 0.05; return [axis.low !== undefined ? low : low / m, axis.high !== undefined ? high : high * m]; }
        if (low === high) { low -= Math.abs(low) / 2 || 1; high += Math.abs(high) / 2 || 1; }
        const m = 0.05 * (high - low);
        return [axis.zero && low === 0 ? 0 : low - m, high + m];
      };
      if (!all.length) { make(svg, "text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "empty" }, spec.empty || "nothing was recorded"); host.points = []; return; }
      const [x0, x1] = span(spec.x, all.map((p) => p[0])), [y0, y1] = span(spec.y, all.map((p) => p[1]));
      const place = (v, a, b, log) => (log ? Math.log(v / a) / Math.log(b / a) : (v - a) / (b - a));
      const px = (v) => left + place(v, x0, x1, spec.x.log) * (width - left - right);
      const py = (v) => height - bottom - place(v, y0, y1, spec.y.log) * (height - top - bottom);
      for (const v of spec.x.ticks || ticks(x0, x1, spec.x.log, Math.max(3, Math.floor(width / 110)))) {
        if (v < x0 || v > x1) continue;
        make(svg, "line", { x1: px(v), x2: px(v), y1: top, y2: height - bottom, class: "grid" });
        make(svg, "text", { x: px(v), y: height - bottom + 17, "text-anchor": "middle", class: "tick" }, (spec.x.text || number)(v));
      }
      for (const v of spec.y.ticks || ticks(y0, y1, spec.y.log, 6)) {
        if (v < y0 || v > y1) continue;
        make(svg, "line", { x1: left, x2: width - right, y1: py(v), y2: py(v), class: "grid" });
        make(svg, "text", { x: left - 6, y: py(v) + 4, "text-anchor": "end", class: "tick" }, (spec.y.text || number)(v));
      }
      make(svg, "rect", { x: left, y: top, width: width - left - right, height: height - top - bottom, class: "frame" });
      make(svg, "text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, spec.x.name);
      make(svg, "text", { x: 0, y: 0, transform: `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, spec.y.name);
      const clip = id + "-clip";
      make(make(make(svg, "defs", {}), "clipPath", { id: clip }), "rect", { x: left, y: top, width: width - left - right, height: height - top - bottom });
      const inside = make(svg, "g", { "clip-path": `url(#${clip})` });
      if (spec.area) make(inside, "path", { d: spec.area.map((p, k) => (k ? "L" : "M") + px(p[0]).toFixed(1) + " " + py(Math.max(p[1], y0)).toFixed(1)).join("") + `L${px(x1)} ${py(y0)}L${px(x0)} ${py(y0)}z`, fill: "var(--shade)" });
      if (spec.mark) make(inside, "line", { x1: px(spec.mark), x2: px(spec.mark), y1: top, y2: height - bottom, stroke: "var(--soft)", "stroke-width": 1.5, "stroke-dasharray": "3 3", class: "mark" });
      host.points = [];
      for (const s of shown) {
        const paint = s.still ? "var(--text)" : color(s.number), group = make(inside, "g", { class: "series", "data-name": s.name });
        if (s.line) make(group, "path", { d: s.points.map((p, k) => (k ? "L" : "M") + px(p[0]).toFixed(1) + " " + py(p[1]).toFixed(1)).join(""), fill: "none", stroke: paint, "stroke-width": s.width || 1.9, "stroke-dasharray": s.dash !== undefined ? s.dash : dash(s.number), "stroke-linejoin": "round" });
        if (s.marks || (s.line && s.points.length === 1)) for (const p of s.points) marker(group, MARKS[s.number % MARKS.length], px(p[0]), py(p[1]), paint, s.filled !== false);
        for (const p of s.points) host.points.push([px(p[0]), py(p[1]), s.name + (p[2] ? "\n" + p[2] : "")]);
      }
      for (const [x, y, words, anchor] of spec.words || []) make(svg, "text", { x: px(x), y: py(y), class: "tick", "text-anchor": anchor || "start" }, words);
      host.scale = width;
    };
    host.addEventListener("pointermove", (event) => tell(host, event));
    host.addEventListener("pointerdown", (event) => tell(host, event));
    host.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
    drawn.push(draw);
    draw();
    return draw;
  }

  function tell(host, event) {
    const tip = byId("tip"), box = host.getBoundingClientRect(), ratio = (host.scale || box.width) / box.width;
    const x = (event.clientX - box.left) * ratio, y = (event.clientY - box.top) * ratio;
    let best = null, least = 30 ** 2;
    for (const p of host.points || []) {
      const d = (p[0] - x) ** 2 + (p[1] - y) ** 2;
      if (d < least) { least = d; best = p; }
    }
    tip.hidden = !best;
    if (!best) return;
    tip.textContent = best[2];
    tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)) + "px";
    const below = event.clientY + 18;
    tip.style.top = (below + tip.offsetHeight > innerHeight ? Math.max(4, event.clientY - tip.offsetHeight - 12) : below) + "px";
  }

  const redraw = () => drawn.forEach((draw) => draw());
  const runs = () => data.runs.map((run, k) => [run, k]).filter(([, k]) => !hidden.has(k));
  const on = (id, change) => byId(id).addEventListener("input", change);

  // ------------------------------------------------------------------------------------------------------------ the parts

  function legend() {
    data.runs.forEach((run, k) => {
      const label = element(byId("legend"), "label"), box = element(label, "input");
      box.type = "checkbox";
      box.checked = true;
      box.dataset.run = k;
      const svg = make(label, "svg", { width: 34, height: 14, "aria-hidden": "true" });
      make(svg, "line", { x1: 1, x2: 33, y1: 7, y2: 7, stroke: color(k), "stroke-width": 2, "stroke-dasharray": dash(k) });
      marker(svg, MARKS[k % MARKS.length], 17, 7, color(k), true);
      element(label, "span", run.label);
      box.addEventListener("change", () => { box.checked ? hidden.delete(k) : hidden.add(k); redraw(); });
    });
  }

  const about = (bits, error, more) => `${number(bits)} bits per coordinate, error ${number(error)}${more ? "\n" + more : ""}`;

  function plane() {
    const what = byId("plane-what").value, series = [];
    for (const [run, k] of runs()) {
      const steps = run.exchanges, points = [];
      if (what === "steps") (steps.step || []).forEach((step, j) => points.push([steps.message_error[j], steps.bits_per_coordinate[j], about(steps.bits_per_coordinate[j], steps.message_error[j], "step " + step)]));
      else if (what === "layers") run.layers.filter((layer) => layer.error > 0).forEach((layer) => points.push([layer.error, layer.bits, layer.name + "\n" + about(layer.bits, layer.error)]));
      else points.push([run.error, run.bits, about(run.bits, run.error, run.above === null ? "" : `${number(run.above)} bits above the limit`)]);
      series.push({ name: run.label, number: k, points: points, marks: true, filled: run.guarantee !== "unbiased" });
    }
    const errors = series.flatMap((s) => s.points.map((p) => p[0])).filter((e) => e > 0), all = series.flatMap((s) => s.points.map((p) => p[1])).filter((b) => b > 0);
    const low = Math.min(0.003, ...errors) / 2, high = Math.max(1, ...errors) * 1.5, curve = [], unbiased = [];
    for (let k = 0; k <= 160; k++) {
      const e = low * (high / low) ** (k / 160);
      curve.push([e, Math.max(1e-9, 0.5 * Math.log2(1 / e))]);
      unbiased.push([e, 0.5 * Math.log2(1 + 1 / e)]);
    }
    const floor = Math.min(0.2, ...all) / 2, roof = Math.max(8, ...all) * 1.5, tick = [];
    for (let k = Math.ceil(Math.log2(floor)); k <= Math.log2(roof); k++) tick.push(2 ** k);
    series.push({ name: "limit for any compressor", points: curve.filter((p) => p[1] > floor), line: true, dash: "", width: 1.6, still: true });
    series.push({ name: "limit for unbiased ones", points: unbiased, line: true, dash: "5 3", width: 1.2, still: true });
    return {
      label: "Bits per coordinate against the relative squared error of messages, with the limits", series: series, area: curve,
      x: { name: "relative squared error of a message", log: true, low: low, high: high },
      y: { name: "bits per coordinate", log: true, low: floor, high: roof, ticks: tick, text: (v) => (v >= 1 ? String(v) : "1/" + Math.round(1 / v)) },
      empty: "no error was measured (log with error measurement: tersegrad train --log)",
    };
  }

  const METRICS = [
    ["accuracy", "share of examples right", percent], ["test_loss", "loss on examples held out", number],
  ];

  function bought() {
    const [key, name, text] = METRICS.find((m) => m[0] === byId("bytes-what").value) || METRICS[0], log = byId("bytes-scale").value === "log";
    const series = runs().map(([run, k]) => ({
      name: run.label, number: k, line: true, marks: run.evaluations.step.length < 40,
      points: run.evaluations.step.map((step, j) => [run.evaluations.sent[j], run.evaluations[key][j], `${text(run.evaluations[key][j])} after ${bytes(run.evaluations.sent[j])}, step ${step}`]),
    }));
    return { label: name + " against the bytes that a worker sent", series: series, x: { name: "sent by a worker", log: log, zero: true, text: bytes }, y: { name: name, text: text }, empty: "nothing was evaluated" };
  }

  function link() {
    const k = Number(byId("link-rate").value), here = data.links.rates[k];
    byId("link-name").textContent = rate(here);
    byId("verdict").textContent = data.links.verdicts[k] || "";
    const series = runs().filter(([run]) => run.seconds).map(([run, n]) => ({
      name: run.label, number: n, line: true, points: data.links.rates.map((r, j) => [r, run.seconds[j], `${seconds(run.seconds[j])} per step at ${rate(r)}`]),
    }));
    if (data.links.predicted) series.push({ name: "bf16 all-reduce, predicted", still: true, line: true, dash: "2 4", points: data.links.rates.map((r, j) => [r, data.links.predicted[j], `${seconds(data.links.predicted[j])} per step at ${rate(r)}`]) });
    return { label: "Time of a training step against the speed of a worker's link", series: series, mark: here, x: { name: "speed of a worker's link", log: true, text: rate }, y: { name: "time of a step", log: true, text: seconds }, empty: "no run has ended yet" };
  }

  const TIMES = {
    loss: ["training loss", number], accuracy: ["share of examples right", percent], test_loss: ["loss on examples held out", number], rate: ["learning rate", number],
    bits_per_coordinate: ["bits per coordinate of a message", number], message_error: ["error of a message", number], residual_norm: ["norm of the residual", number],
    "seconds/step": ["time of an exchange", seconds], "seconds/encode": ["time of encoding", seconds], "seconds/decode": ["time of decoding", seconds], "seconds/wire": ["time of waiting for the wire", seconds],
  };
  const source = (run, key) => [run.progress, run.evaluations, run.exchanges].find((s) => s[key] && s[key].some((v) => v !== null));

  function overTime() {
    const key = byId("time-what").value, [name, text] = TIMES[key] || ["", number];
    const series = runs().map(([run, k]) => {
      const from = source(run, key) || { step: [] };
      return { name: run.label, number: k, line: true, points: from.step.map((step, j) => [step, from[key][j], `step ${step}: ${text(from[key][j])}`]) };
    });
    return { label: name + " against steps", series: series, x: { name: "step", zero: true }, y: { name: name, text: text, zero: key.startsWith("seconds") } };
  }

  // --------------------------------------------------------------------------------------------------------------- layers

  let order = ["numel", -1], chosen = new Set();
  const run = () => data.runs[Number(byId("layers-run").value)];

  function layers() {
    const what = byId("layers-what").value, names = { bits: "bits per coordinate", error: "error", residual: "residual norm" };
    const found = run() || { layers: [], layer_steps: [] };
    const series = found.layers.filter((layer) => chosen.has(layer.name)).map((layer) => ({
      name: layer.name, number: found.layers.indexOf(layer), line: true,
      points: found.layer_steps.map((step, j) => [step, (layer.over_time[what] || [])[j], `step ${step}: ${number((layer.over_time[what] || [])[j])}`]).filter((p) => p[1] !== undefined),
    }));
    return { label: names[what] + " of layers against steps", series: series, x: { name: "step", zero: true }, y: { name: names[what], zero: true }, empty: found.layers.length ? "choose layers in the table below" : "this run recorded no layers" };
  }

  function layerTable(draw) {
    const found = run() || { layers: [] }, body = byId("layers-table").tBodies[0], [key, way] = order;
    const value = (layer) => (layer[key] === null || layer[key] === undefined ? -Infinity : layer[key]);
    const rows = found.layers.slice().sort((a, b) => way * (typeof value(a) === "string" && typeof value(b) === "string" ? value(a).localeCompare(value(b)) : typeof value(a) === "string" ? 1 : typeof value(b) === "string" ? -1 : value(a) - value(b)));
    body.textContent = "";
    for (const layer of rows) {
      const row = element(body, "tr"), first = element(row, "td", undefined, "text drawn"), box = element(first, "input");
      const place = found.layers.indexOf(layer), sample = make(first, "svg", { width: 30, height: 10, "aria-hidden": "true" });
      make(sample, "line", { x1: 1, x2: 29, y1: 5, y2: 5, stroke: color(place), "stroke-width": 2, "stroke-dasharray": dash(place) });
      box.type = "checkbox";
      box.checked = chosen.has(layer.name);
      box.setAttribute("aria-label", "draw " + layer.name);
      box.addEventListener("change", () => { box.checked ? chosen.add(layer.name) : chosen.delete(layer.name); draw(); });
      element(row, "td", layer.name, "text name");
      element(row, "td", layer.numel.toLocaleString("en"));
      for (const part of ["bits", "error", "residual"]) element(row, "td", number(layer[part]));
      element(row, "td", layer.dense || "", "text");
    }
    for (const head of byId("layers-table").querySelectorAll("th[data-key]")) head.setAttribute("aria-sort", head.dataset.key !== key ? "none" : way > 0 ? "ascending" : "descending");
    const dense = found.layers.filter((layer) => layer.dense), of = found.layers.reduce((sum, layer) => sum + layer.numel, 0);
    const share = dense.reduce((sum, layer) => sum + layer.numel, 0);
    byId("dense-note").textContent = found.layers.length ? (dense.length ? `${dense.length} of ${found.layers.length} layers were sent dense, ${share.toLocaleString("en")} of ${of.toLocaleString("en")} coordinates.` : "No layer was sent dense.") : "";
  }

  function chooseLayers() {
    const found = run() || { layers: [] };
    chosen = new Set(found.layers.filter((layer) => !layer.dense).sort((a, b) => b.numel - a.numel).slice(0, 6).map((layer) => layer.name));
  }

  function options(id, entries) {
    for (const [value, text] of entries) element(byId(id), "option", text).value = value;
    byId(id).disabled = entries.length < 2;
  }

  legend();
  options("bytes-what", METRICS.filter(([key]) => data.runs.some((r) => r.evaluations[key].some((v) => v !== null))).map(([key, name]) => [key, name]));
  options("time-what", Object.keys(TIMES).filter((key) => data.runs.some((r) => source(r, key))).map((key) => [key, TIMES[key][0]]));
  options("layers-run", data.runs.map((r, k) => [k, r.label]).filter(([k]) => data.runs[k].layers.length));
  const varied = data.runs.findIndex((r) => new Set(r.layers.filter((layer) => !layer.dense).map((layer) => layer.bits)).size > 1);
  if (varied >= 0) byId("layers-run").value = varied;
  byId("layers-section").hidden = !data.runs.some((r) => r.layers.length);
  byId("link-rate").max = data.links.rates.length - 1;
  byId("link-rate").value = data.links.start;
  on("plane-what", figure("plane", plane));
  const buy = figure("bytes", bought);
  on("bytes-what", buy);
  on("bytes-scale", buy);
  on("link-rate", figure("link", link));
  on("time-what", figure("time", overTime));
  chooseLayers();
  const drawLayers = figure("layers", layers);
  layerTable(drawLayers);
  on("layers-what", drawLayers);
  on("layers-run", () => { chooseLayers(); layerTable(drawLayers); drawLayers(); });
  for (const head of byId("layers-table").querySelectorAll("th[data-key] button")) head.addEventListener("click", () => {
    const key = head.parentElement.dataset.key;
    order = [key, order[0] === key ? -order[1] : key === "name" ? 1 : -1];
    layerTable(drawLayers);
  });
  let wait = 0, before = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== before) { before = innerWidth; clearTimeout(wait); wait = setTimeout(redraw, 120); } });
  document.body.dataset.ready = "yes";
})();
