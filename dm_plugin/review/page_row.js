"use strict";
// The worked row: eight logits to move, formats to choose, three deltas to compare. Arithmetic is page_math.js.
const FORMATS = { none: "not rounded", bf16: "BF16", e4m3: "E4M3", e5m2: "E5M2" };
const MODE_COLOUR = { stale: 2, consistent: 4, matched: 1 };
const MODE_SAYS = {
  stale: "delta = ⟨dO, O⟩: neither number is the one the gradient uses.",
  consistent: "delta = ⟨dO̲, O⟩ with dO as the tensor core sees it: the gradient rounding is gone, the probability rounding is not.",
  matched: "delta = Σⱼ Pⱼ dP̲ⱼ: taken from the operands of the gradient itself, so nothing is left but FP32 round-off.",
};
const START = { mode: "stale", p: "e4m3", do: "e4m3", v: "e4m3", o: "bf16", centre: false };
const rowState = { row: null, choice: { ...START }, preset: null };
const signed = (x) => (x === 0 ? "0" : `${x > 0 ? "+" : "−"}${fmt(Math.abs(x), 3)}`);

function buildWidget() {
  const presets = el("div", { class: "presets", role: "group", "aria-label": "Rows to start from" },
    DATA.rows.map((r) => el("button", { type: "button", "data-preset": r.key, onclick: () => loadPreset(r) }, r.label)),
    el("button", { type: "button", "data-preset": "random", onclick: () => { rowState.row = randomRow((Math.random() * 2 ** 32) >>> 0, 1, 0); rowState.preset = "random"; fillSliders(); drawRow(); } }, "Random row"));
  const sliders = Array.from({ length: 8 }, (_, j) => el("label", { class: "slider" }, `key ${j + 1}`,
    el("input", { type: "range", min: "-12", max: "12", step: "0.05", id: `logit-${j}`, "aria-label": `logit of key ${j + 1}`, oninput: (e) => { rowState.row.logits[j] = Number(e.target.value); rowState.preset = null; drawRow(); } }), el("output", { id: `logit-out-${j}` })));
  const select = (key, word, formats) => el("label", { class: "choice" }, word,
    el("select", { id: `format-${key}`, onchange: (e) => { rowState.choice[key] = e.target.value; drawRow(); } }, formats.map((f) => el("option", { value: f, selected: f === rowState.choice[key] }, FORMATS[f]))));
  const modes = el("div", { class: "segments", role: "radiogroup", "aria-label": "Which delta is subtracted" }, MODES.map((m) => el("label", { class: `c${MODE_COLOUR[m]}` },
    el("input", { type: "radio", name: "mode", value: m, id: `mode-${m}`, checked: m === rowState.choice.mode, onchange: () => { rowState.choice.mode = m; drawRow(); } }), el("span", {}, m))));
  const centre = el("label", { class: "choice" }, "subtract the mean of V first", el("input", { type: "checkbox", id: "centre", onchange: (e) => { rowState.choice.centre = e.target.checked; drawRow(); } }));
  $("row-widget").replaceChildren(presets, el("div", { class: "widget" },
    el("div", { class: "card" }, el("fieldset", {}, el("legend", {}, "Delta"), modes), el("fieldset", {}, el("legend", {}, "Logits"), sliders),
      el("fieldset", {}, el("legend", {}, "Rounding"), select("p", "P", ["none", "e4m3"]), select("do", "dO", ["none", "e4m3", "e5m2"]), select("v", "V", ["none", "e4m3"]), select("o", "stored O", ["none", "bf16", "e4m3"]), centre)),
    el("div", { class: "card" },
      el("div", { class: "sum" }, el("p", { class: "big" }, el("output", { id: "row-sum" }), el("span", { class: "what" }, "sum of the row of dS; exactly 0 in exact arithmetic")), el("p", { class: "big" }, el("output", { id: "row-ratio" }), el("span", { class: "what" }, "of the row's size, before the cast")), el("p", { class: "big" }, el("output", { id: "row-ratio-cast" }), el("span", { class: "what" }, "after the cast of dS to E4M3"))),
      el("p", { class: "note", id: "row-says" }), el("div", { class: "chart-box", id: "row-chart" }), el("h3", {}, "Where the row sum comes from"), el("div", { class: "chart-box", id: "row-parts" }), el("p", { class: "equation", id: "row-split", "aria-live": "polite" }), el("p", { class: "note", id: "row-note" }),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "the three deltas" }, el("div", { id: "row-modes" })), el("div", { id: "row-table" }))));
  loadPreset(DATA.rows[0]);
}
function loadPreset(r) {
  rowState.row = { logits: [...r.logits], do: [...r.do], v: r.v.map((x) => [...x]) };
  rowState.preset = r.key;
  fillSliders();
  drawRow();
}
function fillSliders() {
  rowState.row.logits.forEach((x, j) => { $(`logit-${j}`).value = x; });
}
function drawRow() {
  const { row, choice } = rowState, r = workRow(row, choice), c = MODE_COLOUR[choice.mode];
  document.querySelectorAll("[data-preset]").forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.preset === rowState.preset)));
  row.logits.forEach((x, j) => { $(`logit-out-${j}`).textContent = x.toFixed(2); });
  $("row-sum").textContent = signed(r.rowSum);
  $("row-ratio").textContent = fmt(r.ratio, 3);
  $("row-ratio-cast").textContent = fmt(r.ratioCast, 3);
  $("row-says").textContent = MODE_SAYS[choice.mode].replaceAll("dO̲", "dO-hat").replaceAll("dP̲", "dP-hat");
  const parts = [["rounding of P", r.probability], ["rounding of dO", r.gradient], ["storing O", r.storage], ["FP32 round-off", r.roundOff]];
  $("row-split").replaceChildren(el("b", {}, signed(r.rowSum)), " = ", ...parts.flatMap(([word, x], i) => [i ? " + " : "", el("b", {}, `(${signed(x)})`), ` ${word}`]));
  const preset = DATA.rows.find((p) => p.key === rowState.preset);
  $("row-note").textContent = preset ? preset.note : rowState.preset === "random" ? "Eight Gaussian logits, Gaussian dO and V, sixteen channels." : "Logits moved by hand; dO and V as in the row you started from.";
  barChart($("row-chart"), r, c);
  const all = MODES.map((mode) => [mode, workRow(row, { ...choice, mode })]);
  partsChart($("row-parts"), r, Math.max(1e-9, ...all.flatMap(([, x]) => [x.probability, x.gradient, x.storage, x.rowSum].map(Math.abs))), c);
  $("row-modes").replaceChildren(tableOf(["delta", "value", "row sum", "of its size", "after the cast"], all.map(([mode, x]) => [el("span", {}, el("span", { class: `key c${MODE_COLOUR[mode]}` }), mode), fmt(x.delta, 4), signed(x.rowSum), fmt(x.ratio, 3), fmt(x.ratioCast, 3)])));
  $("row-table").replaceChildren(tableToggle(() => tableOf(["key", "logit", "P", "P-hat", "dP-hat", "dS", "dS-hat"], row.logits.map((s, j) => [String(j + 1), s.toFixed(2), fmt(r.p[j], 4), fmt(r.pHat[j], 4), fmt(r.dpHat[j], 4), signed(r.ds[j]), signed(r.dsHat[j])]))));
}
function barChart(box, r, colour) { // dS of the eight keys, and their running sum
  const width = box.clientWidth || 560, f = frame(width, 210, "the row of dS, key by key, and its running sum", [18, 10, 26, 52]);
  let run = 0;
  const running = r.ds.map((x) => (run += x)), high = Math.max(...r.ds, ...running, 0), low = Math.min(...r.ds, ...running, 0);
  const sy = linearScale([low, high], f.y), slot = (f.x[1] - f.x[0]) / 8, w = Math.min(34, slot * 0.6);
  axes(f, { ticks: [] }, sy, "", "dS");
  r.ds.forEach((x, j) => {
    const mid = f.x[0] + slot * (j + 0.5);
    f.root.append(svg("rect", { class: `bar c${colour} pale`, x: mid - w / 2, width: w, y: Math.min(sy(0), sy(x)), height: Math.max(1, Math.abs(sy(x) - sy(0))) }), svg("text", { x: mid, y: f.height - 8, "text-anchor": "middle" }, `key ${j + 1}`));
  });
  f.root.append(svg("line", { class: "zero", x1: f.x[0], x2: f.x[1], y1: sy(0), y2: sy(0) }),
    svg("path", { class: `line c${colour}`, d: `M${f.x[0]},${sy(0)}` + running.map((x, j) => `L${(f.x[0] + slot * (j + 0.5)).toFixed(1)},${sy(x).toFixed(1)}`).join("") }), ...running.map((x, j) => mark(colour, f.x[0] + slot * (j + 0.5), sy(x), false, 0.8)));
  box.replaceChildren(f.root, el("p", { class: "note" }, "Bars: dS of each key. Line: their running sum, which must come back to zero at the last key."));
}

function partsChart(box, r, most, colour) { // signed bars that add up to the row sum, on the scale of the worst of the three deltas
  const rows = [["rounding of P", r.probability], ["rounding of dO", r.gradient], ["storing O", r.storage], ["row sum", r.rowSum]];
  const width = box.clientWidth || 560, f = frame(width, 26 * rows.length + 30, "parts of the row sum; the values are in the line below", [4, 64, 26, 108]), sx = linearScale([-most, most], f.x, false);
  for (const [value, text] of sx.ticks) f.root.append(svg("text", { x: sx(value), y: f.y[0] + 16, "text-anchor": "middle" }, text), svg("line", { class: "grid", x1: sx(value), x2: sx(value), y1: f.y[0], y2: f.y[1] }));
  rows.forEach(([word, x], i) => {
    const y = f.y[1] + 26 * i + 4, last = i === rows.length - 1;
    f.root.append(svg("text", { class: last ? "chosen" : "", x: f.x[0] - 10, y: y + 13, "text-anchor": "end" }, word),
      svg("rect", { class: `bar c${colour}${last ? "" : " mid"}`, x: Math.min(sx(0), sx(x)), width: Math.max(1, Math.abs(sx(x) - sx(0))), y, height: 18 }),
      svg("text", { class: "ink", x: sx(x) + (x < 0 ? -6 : 6), y: y + 13, "text-anchor": x < 0 ? "end" : "start" }, signed(x)));
  });
  f.root.append(svg("line", { class: "zero", x1: sx(0), x2: sx(0), y1: f.y[0], y2: f.y[1] }));
  box.replaceChildren(f.root);
}

startTheme();
restore();
finding();
glossary();
buildWidget();
drawAll();
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => { drawAll(); drawRow(); }, 150); });
addEventListener("hashchange", () => { restore(); drawAll(); });
