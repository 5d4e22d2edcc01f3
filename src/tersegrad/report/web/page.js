"use strict";
// Draws the figures of the page from the JSON inside it. Texts of the data only ever become text nodes.
(function () {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent), number = Chart.number;
  const hidden = new Set();  // numbers of runs that are not shown
  const drawn = [];  // a function per figure, called again when the width or the choice of runs changes

  function element(parent, name, text, kind) {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    parent.appendChild(node);
    return node;
  }

  function checkbox(parent, checked, change) {
    const box = element(parent, "input");
    box.type = "checkbox";
    box.checked = checked;
    box.addEventListener("change", () => change(box.checked));
    return box;
  }

  function figure(id, build) {
    const again = Chart.figure(byId(id), byId("tip"), build);
    drawn.push(again);
    return again;
  }

  function scaled(v, units) {
    const [size, unit] = units.find(([size]) => Math.abs(v) >= size) || units[units.length - 1];
    return number(v / size) + " " + unit;
  }

  const bytes = (v) => scaled(v, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]]);
  const rate = (v) => scaled(v, [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]);
  const seconds = (v) => scaled(v, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]);
  const percent = (v) => number(100 * v, 4) + " %";

  const redraw = () => drawn.forEach((draw) => draw());
  const runs = () => data.runs.map((run, k) => [run, k]).filter(([, k]) => !hidden.has(k));
  const on = (id, change) => byId(id).addEventListener("input", change);

  function legend() {
    data.runs.forEach((run, k) => {
      const label = element(byId("legend"), "label");
      checkbox(label, true, (shown) => { shown ? hidden.delete(k) : hidden.add(k); redraw(); });
      Chart.sample(label, k, 34, true);
      element(label, "span", run.label);
    });
  }

  // ------------------------------------------------------------------------------------------------------- bits and error

  const about = (bits, error, more) => `${number(bits)} bits per coordinate, error ${number(error)}${more ? "\n" + more : ""}`;

  function planePoints(run, what) {
    const steps = run.exchanges;
    if (what === "steps") return steps.step.map((step, j) => {
      const bits = steps.bits_per_coordinate[j], error = steps.message_error[j];
      return [error, bits, about(bits, error, "step " + step)];
    });
    if (what === "layers") return run.layers.map((layer) => {
      return [layer.error, layer.bits, layer.name + "\n" + about(layer.bits, layer.error)];
    });
    const place = run.above === null ? "" : `${number(Math.abs(run.above))} bits ${run.above < 0 ? "below" : "above"} the limit`;
    return [[run.error, run.bits, about(run.bits, run.error, place)]];
  }

  function plane() {
    const what = byId("plane-what").value;
    const series = runs().map(([run, k]) => {
      return { name: run.label, number: k, points: planePoints(run, what), marks: true, filled: run.guarantee !== "unbiased" };
    });
    const points = series.flatMap((s) => s.points).filter((p) => p[0] > 0 && p[1] > 0);
    const low = Math.min(0.003, ...points.map((p) => p[0])) / 2, high = Math.max(1, ...points.map((p) => p[0])) * 1.5;
    const floor = Math.min(0.2, ...points.map((p) => p[1])) / 2, roof = Math.max(8, ...points.map((p) => p[1])) * 1.5;
    const errors = Array.from({ length: 161 }, (_, k) => low * (high / low) ** (k / 160));
    const limit = errors.map((e) => [e, Math.max(1e-9, 0.5 * Math.log2(1 / e))]);
    const unbiased = errors.map((e) => [e, 0.5 * Math.log2(1 + 1 / e)]);
    const line = { line: true, still: true };
    series.push({ name: "limit for any compressor", points: limit.filter((p) => p[1] > floor), dash: "", width: 1.6, ...line });
    series.push({ name: "limit for unbiased ones", points: unbiased, dash: "5 3", width: 1.2, ...line });
    const ticks = [];
    for (let k = Math.ceil(Math.log2(floor)); k <= Math.log2(roof); k++) ticks.push(2 ** k);
    const fraction = (v) => (v >= 1 ? String(v) : "1/" + Math.round(1 / v));
    return {
      label: "Bits per coordinate against the relative squared error of messages, with the limits",
      series: series,
      area: limit,
      x: { name: "relative squared error of a message", log: true, low: low, high: high },
      y: { name: "bits per coordinate", log: true, low: floor, high: roof, ticks: ticks, text: fraction },
      empty: "no error was measured",
    };
  }

  // ---------------------------------------------------------------------------------------------------- bytes, link, time

  const BOUGHT = [["accuracy", "share of examples right", percent], ["test_loss", "loss on examples held out", number]];

  function bought() {
    const [key, name, text] = BOUGHT.find((m) => m[0] === byId("bytes-what").value) || BOUGHT[0];
    const series = runs().map(([run, k]) => {
      const found = run.evaluations;
      const words = (j) => `${text(found[key][j])} after ${bytes(found.sent[j])}, step ${found.step[j]}`;
      const points = found.step.map((_, j) => [found.sent[j], found[key][j], words(j)]);
      return { name: run.label, number: k, line: true, marks: points.length < 40, points: points };
    });
    const x = { name: "sent by a worker", log: byId("bytes-scale").value === "log", zero: true, text: bytes };
    const label = name + " against the bytes that a worker sent";
    return { label: label, series: series, x: x, y: { name: name, text: text }, empty: "nothing was evaluated" };
  }

  function link() {
    const k = Number(byId("link-rate").value), links = data.links;
    byId("link-name").textContent = rate(links.rates[k]);
    byId("verdict").textContent = links.verdicts[k] || "";
    const points = (times) => links.rates.map((r, j) => [r, times[j], `${seconds(times[j])} per step at ${rate(r)}`]);
    const series = runs().filter(([run]) => run.seconds).map(([run, n]) => {
      return { name: run.label, number: n, line: true, points: points(run.seconds) };
    });
    if (links.predicted) {
      series.push({ name: "bf16 all-reduce, predicted", still: true, line: true, dash: "2 4", points: points(links.predicted) });
    }
    return {
      label: "Time of a training step against the speed of a worker's link",
      series: series,
      mark: links.rates[k],
      measured: links.measured ? [links.measured, `measured: ${rate(links.measured)}, ${links.latency}`] : null,
      x: { name: "speed of a worker's link", log: true, text: rate },
      y: { name: "time of a step", log: true, text: seconds },
      empty: "no run has ended yet",
    };
  }

  const TIMES = {
    loss: ["training loss", number],
    accuracy: ["share of examples right", percent],
    test_loss: ["loss on examples held out", number],
    rate: ["learning rate", number],
    bits_per_coordinate: ["bits per coordinate of a message", number],
    message_error: ["error of a message", number],
    residual_norm: ["norm of the residual", number],
    "seconds/step": ["time of an exchange", seconds],
    "seconds/encode": ["time of encoding", seconds],
    "seconds/decode": ["time of decoding", seconds],
    "seconds/wire": ["time of waiting for the wire", seconds],
  };
  const recorded = (table, key) => table[key] && table[key].some((v) => v !== null);
  const source = (run, key) => [run.progress, run.evaluations, run.exchanges].find((table) => recorded(table, key));

  function overTime() {
    const key = byId("time-what").value, [name, text] = TIMES[key] || ["", number];
    const series = runs().map(([run, k]) => {
      const from = source(run, key) || { step: [] };
      const points = from.step.map((step, j) => [step, from[key][j], `step ${step}: ${text(from[key][j])}`]);
      return { name: run.label, number: k, line: true, points: points };
    });
    const y = { name: name, text: text, zero: key.startsWith("seconds") };
    return { label: name + " against steps", series: series, x: { name: "step", zero: true }, y: y };
  }

  // --------------------------------------------------------------------------------------------------------------- layers

  const MEANINGS = { bits: "bits per coordinate", error: "error", residual: "residual norm" };
  const NONE = { layers: [], layer_steps: [] };
  let order = { key: "numel", way: -1 }, chosen = new Set();
  const current = () => data.runs[Number(byId("layers-run").value)] || NONE;

  function layers() {
    const what = byId("layers-what").value, run = current();
    const series = run.layers.filter((layer) => chosen.has(layer.name)).map((layer) => {
      const values = layer.over_time[what];
      const points = run.layer_steps.map((step, j) => [step, values[j], `step ${step}: ${number(values[j])}`]);
      return { name: layer.name, number: run.layers.indexOf(layer), line: true, points: points };
    });
    return {
      label: MEANINGS[what] + " of layers against steps",
      series: series,
      x: { name: "step", zero: true },
      y: { name: MEANINGS[what], zero: true },
      empty: run.layers.length ? "choose layers in the table below" : "this run recorded no layers",
    };
  }

  function compare(a, b) {
    const [x, y] = [a[order.key], b[order.key]].map((v) => v ?? "");
    return order.way * (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y)));
  }

  function layerRow(body, layer, place, draw) {
    const row = element(body, "tr"), first = element(row, "td", undefined, "text drawn");
    const choose = (shown) => { shown ? chosen.add(layer.name) : chosen.delete(layer.name); draw(); };
    checkbox(first, chosen.has(layer.name), choose).setAttribute("aria-label", "draw " + layer.name);
    Chart.sample(first, place, 30, false);
    element(row, "td", layer.name, "text name");
    element(row, "td", layer.numel.toLocaleString("en"));
    for (const part in MEANINGS) element(row, "td", number(layer[part]));
    element(row, "td", layer.dense || "", "text");
  }

  function layerTable(draw) {
    const run = current(), body = byId("layers-table").tBodies[0];
    body.textContent = "";
    for (const layer of run.layers.slice().sort(compare)) layerRow(body, layer, run.layers.indexOf(layer), draw);
    for (const head of byId("layers-table").querySelectorAll("th[data-key]")) {
      const sorted = order.way > 0 ? "ascending" : "descending";
      head.setAttribute("aria-sort", head.dataset.key === order.key ? sorted : "none");
    }
    const dense = run.layers.filter((layer) => layer.dense);
    const count = (found) => found.reduce((sum, layer) => sum + layer.numel, 0).toLocaleString("en");
    const told = `${dense.length} of ${run.layers.length} layers were sent dense, ${count(dense)} of ${count(run.layers)} coordinates`;
    byId("dense-note").textContent = dense.length ? told : run.layers.length ? "No layer was sent dense" : "";
  }

  function chooseLayers() {
    const compressed = current().layers.filter((layer) => !layer.dense).sort((a, b) => b.numel - a.numel);
    chosen = new Set(compressed.slice(0, 6).map((layer) => layer.name));
  }

  // ------------------------------------------------------------------------------------------------------------- controls

  function options(id, entries) {
    for (const [value, text] of entries) element(byId(id), "option", text).value = value;
    byId(id).disabled = entries.length < 2;
  }

  const differ = (run) => new Set(run.layers.filter((layer) => !layer.dense).map((layer) => layer.bits)).size > 1;

  legend();
  options("bytes-what", BOUGHT.filter(([key]) => data.runs.some((r) => recorded(r.evaluations, key))));
  const times = Object.keys(TIMES).filter((key) => data.runs.some((r) => source(r, key)));
  options("time-what", times.map((key) => [key, TIMES[key][0]]));
  options("layers-run", data.runs.map((r, k) => [k, r.label]).filter(([k]) => data.runs[k].layers.length));
  if (data.runs.some(differ)) byId("layers-run").value = data.runs.findIndex(differ);
  byId("layers-section").hidden = !data.runs.some((r) => r.layers.length);
  byId("link-rate").max = data.links.rates.length - 1;
  byId("link-rate").value = data.links.start;
  chooseLayers();
  const drawBytes = figure("bytes", bought), drawLayers = figure("layers", layers);
  layerTable(drawLayers);
  on("plane-what", figure("plane", plane));
  on("bytes-what", drawBytes);
  on("bytes-scale", drawBytes);
  on("link-rate", figure("link", link));
  on("time-what", figure("time", overTime));
  on("layers-what", drawLayers);
  on("layers-run", () => { chooseLayers(); layerTable(drawLayers); drawLayers(); });
  for (const head of byId("layers-table").querySelectorAll("th[data-key]")) {
    head.querySelector("button").addEventListener("click", () => {
      const key = head.dataset.key, first = key === "name" ? 1 : -1;
      order = { key: key, way: order.key === key ? -order.way : first };
      layerTable(drawLayers);
    });
  }
  let wait = 0, before = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === before) return;
    before = innerWidth;
    clearTimeout(wait);
    wait = setTimeout(redraw, 120);
  });
  document.body.dataset.ready = "yes";
})();
