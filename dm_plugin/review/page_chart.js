"use strict";
// Small SVG charts: axes, lines, heat maps. Colours come from CSS, so both themes and print work without redrawing.
const SVG_NS = "http://www.w3.org/2000/svg";
const SUPERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const MARKS = ["M-4,0A4,4 0 1 0 4,0A4,4 0 1 0 -4,0Z", "M-3.6,-3.6H3.6V3.6H-3.6Z", "M0,-5L4.8,3.6H-4.8Z", "M0,-5L5,0L0,5L-5,0Z",
  "M-4.6,-3.4H4.6L0,4.8Z", "M-1.5,-5H1.5V-1.5H5V1.5H1.5V5H-1.5V1.5H-5V-1.5H-1.5Z", "M0,-5L4.8,-1.5L3,4.2H-3L-4.8,-1.5Z"];
const DASHES = ["2 3", "", "7 3", "10 3 2 3", "4 2", "1 3", "12 4"];

function el(tag, attributes = {}, ...children) { // HTML element
  return fill(document.createElement(tag), attributes, children);
}
function svg(tag, attributes = {}, ...children) { // SVG element
  return fill(document.createElementNS(SVG_NS, tag), attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
function fmt(x, digits = 2) { // for tables and sentences: 1.4e-7, 0.018, 23
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-2) return x.toExponential(digits - 1).replace("e+", "e");
  return size >= 100 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(Math.max(digits, 2))));
}
function pct(x) { return x === null || x === undefined ? "–" : x >= 0.1 ? `${Math.round(x * 100)}%` : fmt(x); }
function power(e) { // 10⁻³
  if (e === 0) return "1";
  if (e === 1) return "10";
  return "10" + (e < 0 ? "⁻" : "") + String(Math.abs(e)).split("").map((d) => SUPERS[d]).join("");
}
const finite = (x) => x !== null && x !== undefined && Number.isFinite(x);

function extent(lists, log) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const x of list) if (finite(x) && (!log || x > 0)) { low = Math.min(low, x); high = Math.max(high, x); }
  return low <= high ? [low, high] : log ? [1e-8, 1] : [0, 1];
}
function logScale([low, high], [from, to]) {
  const a = Math.floor(Math.log10(low) + 1e-9), b = Math.max(a + 1, Math.ceil(Math.log10(high) - 1e-9));
  const at = (x) => from + ((Math.log10(Math.max(x, 10 ** a)) - a) / (b - a)) * (to - from);
  const every = Math.max(1, Math.ceil((b - a) / Math.max(2, Math.abs(to - from) / (to > from ? 46 : 34))));
  at.ticks = [];
  for (let e = a; e <= b; e++) if ((b - e) % every === 0) at.ticks.push([10 ** e, power(e)]);
  at.domain = [10 ** a, 10 ** b];
  return at;
}
function linearScale([low, high], [from, to], nice = true) {
  const gap = high - low || 1, count = Math.max(2, Math.min(6, Math.abs(to - from) / 60));
  const raw = gap / count, base = 10 ** Math.floor(Math.log10(raw)), unit = [1, 2, 5, 10].find((m) => m * base >= raw) * base;
  const a = nice ? Math.floor(low / unit) * unit : low, b = nice ? Math.ceil(high / unit - 1e-9) * unit || unit : high;
  const at = (x) => from + ((x - a) / (b - a || 1)) * (to - from);
  at.ticks = [];
  for (let k = Math.ceil(a / unit - 1e-9); k * unit <= b + unit * 1e-6; k++) at.ticks.push([k * unit, String(Number((k * unit).toPrecision(6)))]);
  at.domain = [a, b];
  return at;
}

function frame(width, height, label, pad) { // an SVG with a plot area; pad = [top, right, bottom, left]
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, class: "chart" });
  return { root, x: [pad[3], width - pad[1]], y: [height - pad[2], pad[0]], width, height };
}
function axes(f, sx, sy, xLabel, yLabel) {
  const g = svg("g", { class: "axes", "aria-hidden": "true" });
  for (const [value, text] of sy.ticks) {
    const y = sy(value);
    g.append(svg("line", { class: "grid", x1: f.x[0], x2: f.x[1], y1: y, y2: y }), svg("text", { x: f.x[0] - 6, y: y + 3.5, "text-anchor": "end" }, text));
  }
  for (const [value, text] of sx.ticks) {
    const x = sx(value);
    g.append(svg("line", { class: "tick", x1: x, x2: x, y1: f.y[0], y2: f.y[0] + 4 }), svg("text", { x, y: f.y[0] + 16, "text-anchor": "middle" }, text));
  }
  g.append(svg("line", { class: "base", x1: f.x[0], x2: f.x[1], y1: f.y[0], y2: f.y[0] }));
  if (xLabel) g.append(svg("text", { class: "title", x: f.x[1], y: f.height - 3, "text-anchor": "end" }, xLabel));
  if (yLabel) g.append(svg("text", { class: "title", x: 2, y: 11 }, yLabel));
  f.root.append(g);
}
function mark(colour, x, y, hollow = false, size = 1) {
  return svg("path", { d: MARKS[colour % MARKS.length], transform: `translate(${x.toFixed(1)},${y.toFixed(1)}) scale(${size})`, class: `mark ${hollow ? "hollow" : "solid"} c${colour}` });
}
function pathOf(xs, ys, sx, sy, log) {
  let d = "", pen = "M";
  xs.forEach((x, i) => {
    if (!finite(ys[i]) || (log && ys[i] <= 0)) { pen = "M"; return; }
    d += `${pen}${sx(x).toFixed(1)},${sy(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return d;
}
function spreadLabels(labels, low, high, gap = 13) { // keep end labels apart: [{y}] sorted and pushed
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + gap);
  const over = labels.length ? labels[labels.length - 1].y - high : 0;
  if (over > 0) { labels[labels.length - 1].y -= over; for (let i = labels.length - 2; i >= 0; i--) labels[i].y = Math.min(labels[i].y, labels[i + 1].y - gap); }
}

// series: [{name, colour, x, y, dashed, faint}]; a reader line moves with the pointer or the arrow keys
function lineChart(box, { label, series, log = true, xLabel = "step", yLabel = "", height = 230, clip = null, shade = [] }) {
  const width = box.clientWidth || 640, ends = series.filter((s) => !s.quiet);
  const right = 16 + 7.4 * Math.max(0, ...ends.map((s) => s.name.length));
  const f = frame(width, height, label, [20, right, 30, 44]);
  const sx = linearScale(extent(series.map((s) => s.x), false), f.x, false);
  const range = clip || extent(series.map((s) => s.y), log);
  const sy = log ? logScale(range, f.y) : linearScale(range, f.y);
  for (const [low, high, name] of shade) {
    const top = sy(Math.min(high, sy.domain[1])), bottom = sy(Math.max(low, sy.domain[0]));
    if (bottom > top) f.root.append(svg("rect", { class: `zone ${name}`, x: f.x[0], width: f.x[1] - f.x[0], y: top, height: bottom - top }));
  }
  axes(f, sx, sy, xLabel, yLabel);
  const labels = [];
  for (const s of series) {
    f.root.append(svg("path", { class: `line c${s.colour}${s.faint ? " faint" : ""}`, d: pathOf(s.x, s.y, sx, sy, log), "stroke-dasharray": s.dashed ? "3 4" : DASHES[s.colour % DASHES.length] }));
    if (s.x.length < 3) s.x.forEach((x, i) => finite(s.y[i]) && f.root.append(mark(s.colour, sx(x), sy(s.y[i]), s.dashed)));
    let last = s.y.length - 1;
    while (last >= 0 && !finite(s.y[last])) last--;
    if (last >= 0 && !s.quiet) labels.push({ y: sy(s.y[last]) + 4, text: s.name, colour: s.colour });
  }
  spreadLabels(labels, f.y[1], f.y[0]);
  for (const l of labels) f.root.append(svg("text", { class: `end c${l.colour}`, x: f.x[1] + 6, y: l.y }, l.text));
  const readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at the chart, or focus it and use the arrow keys, to read values.");
  reader(f, sx, series, readout, xLabel);
  box.replaceChildren(f.root, readout);
}
function reader(f, sx, series, readout, xLabel) {
  const xs = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  if (!xs.length) return;
  const line = svg("line", { class: "cursor", y1: f.y[0], y2: f.y[1], visibility: "hidden" });
  f.root.append(line);
  let at = xs.length - 1;
  const show = () => {
    line.setAttribute("x1", sx(xs[at])); line.setAttribute("x2", sx(xs[at])); line.setAttribute("visibility", "visible");
    const parts = series.filter((s) => !s.noRead).map((s) => { const i = nearest(s.x, xs[at]); return i < 0 ? null : [el("span", { class: `key c${s.colour}` }), `${s.name} ${fmt(s.y[i], 3)}  `]; });
    readout.replaceChildren(`${xLabel} ${xs[at]}: `, ...parts.flat().filter((x) => x !== null));
  };
  f.root.setAttribute("tabindex", "0");
  f.root.addEventListener("pointermove", (event) => {
    const rect = f.root.getBoundingClientRect(), x = ((event.clientX - rect.left) / rect.width) * f.width;
    at = xs.reduce((best, v, i) => (Math.abs(sx(v) - x) < Math.abs(sx(xs[best]) - x) ? i : best), 0);
    show();
  });
  f.root.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -xs.length, End: xs.length }[event.key];
    if (!jump) return;
    event.preventDefault();
    at = Math.max(0, Math.min(xs.length - 1, at + jump));
    show();
  });
}
function nearest(xs, x) { return xs.reduce((best, v, i) => (best < 0 || Math.abs(v - x) < Math.abs(xs[best] - x) ? i : best), -1); }

// Colour ramps, safe for colour-blind readers: cividis stops; blue to orange for "cancels" to "does not"
const RAMPS = {
  seq: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
  split: ["#08457e", "#1f6fb0", "#5ba3d6", "#a8cfe8", "#e8eef0", "#f7dcb4", "#f3b562", "#e6842a", "#c65a00", "#8a3800"],
};
function rampColour(ramp, t) {
  const stops = RAMPS[ramp], x = Math.max(0, Math.min(1, t)) * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(x));
  const [a, b] = [stops[i], stops[i + 1]].map((h) => [1, 3, 5].map((k) => parseInt(h.slice(k, k + 2), 16)));
  return a.map((v, k) => Math.round(v + (b[k] - v) * (x - i)));
}
// grid[row][column] of positive numbers; rows are layers. pick(row) is called on click or Enter.
function heatMap(box, { label, grid, rows, columns, rowWord = "", columnWord, range, ramp = "seq", selected = -1, pick = null, describe }) {
  const width = box.clientWidth || 640, cell = Math.max(7, Math.min(20, 420 / Math.max(1, rows.length)));
  const f = frame(width, cell * rows.length + 78, label, [16, 12, 62, Math.min(100, 14 + 6.2 * Math.max(...rows.map((r) => r.length), 2))]);
  const n = columns.length, m = rows.length, lo = Math.log10(range[0]), hi = Math.log10(range[1]);
  const canvas = document.createElement("canvas");
  canvas.width = n; canvas.height = m;
  const image = canvas.getContext("2d").createImageData(n, m);
  grid.forEach((row, r) => (row || []).forEach((v, c) => {
    if (!finite(v)) return;
    image.data.set([...rampColour(ramp, (Math.log10(Math.max(v, range[0])) - lo) / (hi - lo)), 255], 4 * (r * n + c));
  }));
  canvas.getContext("2d").putImageData(image, 0, 0);
  const [x0, x1] = f.x, w = x1 - x0, h = cell * m, top = f.y[1];
  f.root.append(svg("rect", { class: "nodata", x: x0, y: top, width: w, height: h }), svg("image", { href: canvas.toDataURL(), x: x0, y: top, width: w, height: h, preserveAspectRatio: "none", style: "image-rendering:pixelated" }));
  const every = Math.max(1, Math.ceil(12 / cell));
  rows.forEach((name, r) => (r % every === 0 || r === selected) && (r === selected || every === 1 || Math.abs(r - selected) >= every || selected < 0) && f.root.append(svg("text", { class: r === selected ? "title chosen" : "title", x: x0 - 6, y: top + cell * (r + 0.5) + 4, "text-anchor": "end" }, name)));
  for (let k = 0; k <= 4; k++) {
    const c = Math.round((k / 4) * (n - 1));
    if (n > 4 || k < n) f.root.append(svg("text", { class: "title", x: x0 + (w * (c + 0.5)) / n, y: top + h + 14, "text-anchor": "middle" }, String(columns[c])));
  }
  f.root.append(svg("text", { class: "title", x: x1, y: top + h + 28, "text-anchor": "end" }, columnWord));
  legend(f, ramp, lo, hi, top + h + 34);
  const box1 = svg("rect", { class: "pick", x: x0 - 1, width: w + 2, height: cell, y: top + cell * Math.max(selected, 0), visibility: selected < 0 ? "hidden" : "visible" });
  const cursor = svg("rect", { class: "cell", width: Math.max(3, w / n), height: cell, visibility: "hidden" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, `Point at a cell, or focus the map and use the arrow keys${pick ? "; click or Enter chooses a layer" : ""}.`);
  f.root.append(box1, cursor);
  let at = [Math.max(selected, 0), n - 1];
  const show = () => {
    cursor.setAttribute("x", x0 + (w * at[1]) / n); cursor.setAttribute("y", top + cell * at[0]); cursor.setAttribute("visibility", "visible");
    readout.textContent = describe(at[0], at[1], (grid[at[0]] || [])[at[1]]);
  };
  f.root.setAttribute("tabindex", "0");
  const find = (event) => {
    const rect = f.root.getBoundingClientRect(), k = f.width / rect.width;
    const c = Math.floor((((event.clientX - rect.left) * k - x0) / w) * n), r = Math.floor(((event.clientY - rect.top) * k - top) / cell);
    return r >= 0 && r < m && c >= 0 && c < n ? [r, c] : null;
  };
  f.root.addEventListener("pointermove", (event) => { const hit = find(event); if (hit) { at = hit; show(); } });
  f.root.addEventListener("click", (event) => { const hit = find(event); if (hit && pick) pick(hit[0]); });
  f.root.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -n], End: [0, n] }[event.key];
    if (event.key === "Enter" && pick) { event.preventDefault(); pick(at[0], true); return; }
    if (!move) return;
    event.preventDefault();
    at = [Math.max(0, Math.min(m - 1, at[0] + move[0])), Math.max(0, Math.min(n - 1, at[1] + move[1]))];
    show();
  });
  box.replaceChildren(f.root, readout);
}
function legend(f, ramp, lo, hi, y) {
  const [x0, x1] = f.x, w = Math.min(240, x1 - x0), id = `ramp-${ramp}`;
  const stops = RAMPS[ramp].map((c, i, all) => svg("stop", { offset: i / (all.length - 1), "stop-color": c }));
  f.root.append(svg("defs", {}, svg("linearGradient", { id }, ...stops)), svg("rect", { x: x0, y, width: w, height: 9, fill: `url(#${id})` }));
  for (let e = Math.ceil(lo); e <= hi; e += Math.max(1, Math.ceil((hi - lo) / 5))) f.root.append(svg("text", { class: "title", x: x0 + (w * (e - lo)) / (hi - lo), y: y + 21, "text-anchor": "middle" }, power(e)));
}

function tableOf(head, rows) { // [["name", ...], [[...], ...]] -> <table>
  return el("table", {}, el("thead", {}, el("tr", {}, head.map((h) => el("th", { scope: "col" }, h)))), el("tbody", {}, rows.map((r) => el("tr", {}, r.map((c, i) => (i ? el("td", {}, c) : el("th", { scope: "row" }, c)))))));
}
function tableToggle(build) { // <details> whose table is made when it is opened
  const body = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table of the chart's values" });
  return el("details", { class: "table", ontoggle: (e) => e.target.open && body.replaceChildren(build()) }, el("summary", {}, "Same data as a table"), body);
}
