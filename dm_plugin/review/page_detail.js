"use strict";
// Everything about one layer, all arms together, and the training curves.
const ROW_ZONES = ZONES.map(([a, b, name]) => [a, b, name]);

function card(title, caption, ...body) {
  return el("figure", {}, el("h3", {}, title), el("figcaption", {}, caption), ...body);
}
function chartCard(title, caption, draw, table) { // draw(box) needs the box in the page to know its width
  const box = el("div", { class: "chart-box" });
  const node = card(title, caption, box, table ? tableToggle(table) : null);
  node.drawLater = () => draw(box);
  return node;
}
function seriesOf(key, options = {}) { // one line per arm that recorded this measure for the chosen layer
  return arms.flatMap((a) => {
    const i = siteIndex(a), y = i >= 0 && a.series[key] ? a.series[key][i] : null;
    return y && y.some(finite) ? [{ name: shortName(a), colour: a.colour, x: a.last, y, ...options }] : [];
  });
}
function stepTable(groups) { // groups: [[heading, series]]
  const steps = [...new Set(groups.flatMap(([, list]) => list.flatMap((s) => s.x)))].sort((a, b) => a - b);
  const head = ["step", ...groups.flatMap(([word, list]) => list.map((s) => (word ? `${s.name}, ${word}` : s.name)))];
  return tableOf(head, steps.map((step) => [String(step), ...groups.flatMap(([, list]) => list.map((s) => { const i = s.x.indexOf(step); return i < 0 ? "–" : fmt(s.y[i], 3); }))]));
}
function defined(key) { return `${DATA.measures[key].definition}.`; }

function residualCards() {
  const pre = seriesOf("row_sum_pre.median"), post = seriesOf("row_sum_post.median"), out = [];
  if (pre.length) out.push(chartCard("Row residual before the cast", `${defined("row_sum_pre.median")} Shaded: matches, drifts, does not match.`,
    (box) => lineChart(box, { label: "row residual before the cast by step", series: pre, shade: ROW_ZONES, clip: [1e-9, Math.max(1, ...pre.flatMap((s) => s.y.filter(finite)))] }), () => stepTable([["", pre]])));
  if (post.length) out.push(chartCard("Row residual after the cast", `${defined("row_sum_post.median")} The cast of dS to FP8 leaves this much even when the delta matches.`,
    (box) => lineChart(box, { label: "row residual after the cast by step", series: post }), () => stepTable([["", post]])));
  return out;
}
function keyCards() {
  const key = seriesOf("key_col_sum.ratio"), top = seriesOf("gain_share.top1"), out = [];
  if (key.length) out.push(chartCard("Key-gradient columns", `${defined("key_col_sum.ratio")} Seen from outside, so every backend has it.`,
    (box) => lineChart(box, { label: "key column residual by step", series: key }), () => stepTable([["", key]])));
  if (top.length) out.push(chartCard("Largest channel's share by step", defined("gain_share.top1"), (box) => lineChart(box, { label: "top-1 gain share by step", series: top }), () => stepTable([["", top]])));
  return out;
}

function bucketCards() { // grouped dots: bucket on x, residual on a log axis
  const out = [];
  for (const [probe, when] of [["row_sum_pre", "before"], ["row_sum_post", "after"]]) {
    const rows = arms.flatMap((a) => { const i = siteIndex(a), y = i >= 0 && a.topP[probe] ? a.topP[probe][i] : null; return y && y.some(finite) ? [{ name: shortName(a), colour: a.colour, y }] : []; });
    if (!rows.length) continue;
    out.push(chartCard(`By the row's largest probability, ${when} the cast`, `Median over the rows of each bucket of |Σⱼ dSᵢⱼ| / Σⱼ |dSᵢⱼ| ${when} the cast, latest quarter of the probed steps. Sharp rows are where a wrong delta does its damage. A mark on the bottom line: exactly zero or below 1e-10.`,
      (box) => bucketChart(box, rows, `row residual by top probability, ${when} the cast`), () => tableOf(["largest P of the row", ...rows.map((r) => r.name)], DATA.topLabels.map((label, b) => [label, ...rows.map((r) => fmt(r.y[b], 3))]))));
  }
  return out;
}
function bucketChart(box, rows, label) {
  const width = box.clientWidth || 430, f = frame(width, 230, label, [20, 12, 44, 44]);
  const [low, high] = extent(rows.map((r) => r.y), true), sy = logScale([Math.min(low, 1e-8), high], f.y), slot = (f.x[1] - f.x[0]) / 5;
  axes(f, { ticks: [] }, sy, "largest probability of the row", "");
  DATA.topLabels.forEach((text, b) => f.root.append(svg("text", { x: f.x[0] + slot * (b + 0.5), y: f.y[0] + 16, "text-anchor": "middle" }, text)));
  rows.forEach((r, k) => {
    const at = (b) => f.x[0] + slot * (b + 0.5) + (k - (rows.length - 1) / 2) * Math.min(14, slot / (rows.length + 1));
    r.y.forEach((v, b) => finite(v) && f.root.append(mark(r.colour, at(b), sy(v), false, 1.1)));
  });
  box.replaceChildren(f.root, armKey(rows));
}
function armKey(rows) {
  return el("p", { class: "note" }, rows.map((r) => [el("span", { class: `key c${r.colour}` }), `${r.name}  `]));
}

function histogramCards() {
  const out = [];
  for (const [probe, when] of [["row_sum_pre", "before"], ["row_sum_post", "after"]]) {
    const rows = arms.flatMap((a) => { const i = siteIndex(a), h = i >= 0 && a.hist[probe] ? a.hist[probe][i] : null; return h && h.n.length + h.under + h.over ? [{ name: shortName(a), colour: a.colour, h }] : []; });
    if (!rows.length) continue;
    out.push(chartCard(`All rows, ${when} the cast`, `Share of rows by |Σⱼ dSᵢⱼ| / Σⱼ |dSᵢⱼ| ${when} the cast, ten bins a decade, latest quarter of the probed steps. ${rows.map((r) => `${r.name}: ${r.h.under} rows below 1e-10 or exactly zero, ${r.h.over} above 100 or not finite`).join("; ")}.`,
      (box) => histogramChart(box, rows, `histogram of row residuals ${when} the cast`),
      () => { const size = rows.map((r) => totalOf(r.h)); return tableOf(["ratio from", ...rows.map((r) => r.name)], binsOf(rows).map((b) => [(10 ** (-10 + b / 10)).toExponential(1), ...rows.map((r, k) => pct((r.h.n[b - r.h.from] || 0) / size[k]))])); }));
  }
  return out;
}
const totalOf = (h) => h.n.reduce((s, x) => s + x, h.under + h.over) || 1;
function binsOf(rows) {
  const low = Math.min(...rows.map((r) => r.h.from)), high = Math.max(...rows.map((r) => r.h.from + r.h.n.length));
  return Array.from({ length: Math.max(0, high - low) }, (_, i) => low + i);
}
function histogramChart(box, rows, label) {
  const width = box.clientWidth || 430, f = frame(width, 220, label, [20, 12, 30, 44]), bins = binsOf(rows);
  const sx = logScale([10 ** (-10 + (bins[0] || 0) / 10), 10 ** (-10 + ((bins[bins.length - 1] || 0) + 1) / 10)], f.x);
  const shares = rows.map((r) => bins.map((b) => (r.h.n[b - r.h.from] || 0) / totalOf(r.h)));
  const sy = linearScale([0, Math.max(0.01, ...shares.flat())], f.y);
  axes(f, sx, sy, "ratio", "share of rows");
  rows.forEach((r, k) => {
    let d = `M${sx(10 ** (-10 + bins[0] / 10)).toFixed(1)},${f.y[0]}`;
    bins.forEach((b, i) => { const y = sy(shares[k][i]).toFixed(1); d += `L${sx(10 ** (-10 + b / 10)).toFixed(1)},${y}L${sx(10 ** (-10 + (b + 1) / 10)).toFixed(1)},${y}`; });
    d += `L${sx(10 ** (-10 + (bins[bins.length - 1] + 1) / 10)).toFixed(1)},${f.y[0]}`;
    f.root.append(svg("path", { class: `area c${r.colour}`, d }), svg("path", { class: `line c${r.colour}`, d, "stroke-dasharray": DASHES[r.colour % DASHES.length] }));
  });
  box.replaceChildren(f.root, armKey(rows));
}

function channelCards() {
  const out = [];
  const rows = arms.filter((a) => siteIndex(a) >= 0 && a.channels[siteIndex(a)]).map((a) => ({ a, y: a.channels[siteIndex(a)] }));
  if (rows.length) {
    const n = Math.max(...rows.map((r) => r.y.length)), [low, high] = extent(rows.map((r) => r.y), true);
    const node = chartCard("Key-gradient columns by channel", "Each cell: |Σⱼ dKⱼc| / Σⱼ |dKⱼc| of one channel c, both summed over sequences and key heads, latest quarter of the probed steps.",
      (box) => heatMap(box, { label: "key column residual by channel and arm", grid: rows.map((r) => r.y), rows: rows.map((r) => shortName(r.a)), columns: Array.from({ length: n }, (_, c) => c), columnWord: "channel", range: [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-6)], describe: (r, c, v) => `${rows[r].a.label}, channel ${c}: ${fmt(v, 3)}` }),
      () => tableOf(["channel", ...rows.map((r) => r.a.label)], Array.from({ length: n }, (_, c) => [String(c), ...rows.map((r) => fmt(r.y[c], 3))])));
    node.classList.add("wide");
    out.push(node);
  }
  const gains = arms.filter((a) => siteIndex(a) >= 0 && a.gains[siteIndex(a)] && a.gains[siteIndex(a)].length).map((a) => ({ name: shortName(a), colour: a.colour, g: a.gains[siteIndex(a)], dim: a.gainDim }));
  if (gains.length) out.push(chartCard("Gains of the query and key norms", `Share of Σ_c (g_q,c g_k,c)² held by the largest channels. ${gains.map((r) => `${r.name}: equal gains would give each ${fmt(1 / r.dim, 3)}`)[0]}.`, (box) => gainChart(box, gains),
    () => tableOf(["arm", "rank", "channel", "share"], gains.flatMap((r) => r.g.map(([c, s], i) => [r.name, String(i + 1), String(c), fmt(s, 3)])))));
  return out;
}
function gainChart(box, rows) {
  const width = box.clientWidth || 430, f = frame(width, 200, "largest gain shares", [20, 12, 34, 44]), n = Math.max(...rows.map((r) => r.g.length));
  const sy = linearScale([0, Math.max(...rows.flatMap((r) => r.g.map(([, s]) => s)))], f.y), slot = (f.x[1] - f.x[0]) / n, w = Math.min(16, (slot * 0.8) / rows.length);
  axes(f, { ticks: [] }, sy, "channels by rank, largest first", "share");
  rows.forEach((r, k) => r.g.forEach(([c, s], i) => {
    const x = f.x[0] + slot * (i + 0.5) + (k - rows.length / 2) * w;
    f.root.append(svg("rect", { class: `bar c${r.colour}`, x, width: w - 1.5, y: sy(s), height: f.y[0] - sy(s) }, svg("title", {}, `${r.name}: channel ${c} holds ${fmt(s, 3)}`)));
  }));
  f.root.append(svg("line", { class: "tick", x1: f.x[0], x2: f.x[1], y1: sy(1 / rows[0].dim), y2: sy(1 / rows[0].dim), "stroke-dasharray": "4 3" }));
  box.replaceChildren(f.root, armKey(rows));
}

const REPLAYED = { stale: "stale", consistent: "consistent", matched: "matched", stock: "stock FP8 casts" };
function replayCards() {
  const columns = ["median", "gap", "col", "dq", "dk", "dv", "push_consistency"];
  const rows = arms.flatMap((a) => Object.entries(REPLAYED).flatMap(([k, word]) => {
    const values = columns.map((c) => (a.now[`replay_${k}.${c}`] || [])[siteIndex(a)]);
    return values.some(finite) ? [[el("span", {}, el("span", { class: `key c${a.colour}` }), a.label), word, ...values.map((v) => fmt(v))]] : [];
  }));
  if (!rows.length) return [];
  const node = card("What another delta would have given", "Operands captured from the running job, replayed on a CPU with each delta and cast: median row residual before the cast, how far the delta lies from the matched one, key columns, relative errors of the gradients against FP64, and how consistently the residual pushes the key gains over the probed steps (1: always the same way). A simulation of the casts, whatever kernel the job ran.",
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "replayed deltas" }, tableOf(["arm", "replayed as", "row residual", "delta gap", "key column", "dQ error", "dK error", "dV error", "push consistency"], rows)));
  node.classList.add("wide");
  return [node];
}

function otherCards() {
  const out = [];
  for (const [key, title, log] of [["max_logit.max", "Largest logit", false], ["entropy.mean", "Entropy of the rows", false], ["row_sum_signed.sharpened", "Sharpened rows", false]]) {
    const series = seriesOf(key);
    if (series.length) out.push(chartCard(title, defined(key), (box) => lineChart(box, { label: `${title} by step`, series, log }), () => stepTable([["", series]])));
  }
  const names = { do: "dO", ds: "dS" }, kinds = ["saturated", "underflowed", "nonfinite", "amax"];
  const rows = arms.flatMap((a) => DATA.codes.flatMap((c) => {
    const i = siteIndex(a), values = kinds.map((k) => (a.now[`codes.${c}.${k}`] || [])[i]);
    return values.some(finite) ? [[el("span", {}, el("span", { class: `key c${a.colour}` }), a.label), names[c] || c, ...values.map((v) => fmt(v))]] : [];
  }));
  if (rows.length) {
    const node = card("What the codes could not hold", "Share of elements at the largest code, rounded to zero although not zero, and not finite; amax is the largest magnitude before quantising. Latest quarter of the probed steps. Block scales put one element of each block at the largest code by design.",
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "code statistics" }, tableOf(["arm", "operand", "saturated", "underflowed", "not finite", "amax"], rows)));
    node.classList.add("wide");
    out.push(node);
  }
  return out;
}

function drawDetail() {
  const sites = [...new Set(arms.flatMap((a) => a.sites))], nameOf = (s) => { const a = arms.find((x) => x.sites.includes(s)); return a.names[a.sites.indexOf(s)]; };
  $("layer").replaceChildren(...sites.map((s) => el("option", { value: s, selected: s === view.site }, nameOf(s))));
  const grid = $("detail-grid");
  if (!view.site) { grid.replaceChildren(el("p", { class: "note" }, "No layer was recorded.")); return; }
  const cards = [...residualCards(), ...bucketCards(), ...histogramCards(), ...keyCards(), ...channelCards(), ...replayCards(), ...otherCards()];
  grid.replaceChildren(...cards);
  cards.forEach((c) => c.drawLater && c.drawLater());
  const order = arms[view.arm].verdicts.map((v) => arms[view.arm].sites[v.site]), at = order.indexOf(view.site);
  $("worse").disabled = at <= 0;
  $("better").disabled = at < 0 || at >= order.length - 1;
}
function stepLayer(by) {
  const order = arms[view.arm].verdicts.map((v) => arms[view.arm].sites[v.site]), next = order[order.indexOf(view.site) + by];
  if (next) choose(next, null);
}
$("layer").addEventListener("change", (e) => choose(e.target.value, null));
$("worse").addEventListener("click", () => stepLayer(-1));
$("better").addEventListener("click", () => stepLayer(1));

function drawTraining() {
  const curved = arms.filter((a) => a.curve), grid = $("training-grid");
  if (!curved.length) { grid.replaceChildren(el("p", { class: "note" }, "No training curve (train.jsonl) lies beside these dumps.")); return; }
  const lines = (key) => curved.filter((a) => a.curve[key].some(finite)).map((a) => ({ name: shortName(a), colour: a.colour, x: a.curve.step, y: a.curve[key] }));
  const cards = [], loss = lines("loss"), norm = lines("gradNorm");
  const merged = Math.max(...curved.map((a) => a.curve.merged));
  if (loss.length) cards.push(chartCard("Loss", `Training loss of each arm${merged > 1 ? `, mean over ${merged} neighbouring steps` : ""}. Tail: ${curved.map((a) => `${a.label} ${fmt(a.curve.tail, 4)}`).join(", ")} (median of the last ${curved[0].curve.tailSteps} steps).`,
    (box) => lineChart(box, { label: "training loss by step", series: loss, log: false, height: 280 }), () => stepTable([["", loss]])));
  const base = curved.find((a) => a.colour === 0);
  if (base && curved.length > 1) {
    const gap = curved.filter((a) => a !== base).map((a) => ({ name: shortName(a), colour: a.colour, x: a.curve.step, y: a.curve.step.map((s, i) => { const j = base.curve.step.indexOf(s); return j < 0 || !finite(a.curve.loss[i]) ? null : a.curve.loss[i] - base.curve.loss[j]; }) }));
    cards.push(chartCard("Loss against the BF16 arm", `Loss minus that of ${base.label} at the same step, on the same data and seed. Gaps of the size of its step-to-step wobble say nothing.`,
      (box) => lineChart(box, { label: "loss gap by step", series: gap, log: false, height: 280 }), () => stepTable([["", gap]])));
  }
  if (norm.length) cards.push(chartCard("Gradient norm", `Global gradient norm before clipping${merged > 1 ? `, mean over ${merged} neighbouring steps` : ""}.`,
    (box) => lineChart(box, { label: "gradient norm by step", series: norm, log: true }), () => stepTable([["", norm]])));
  grid.replaceChildren(...cards);
  cards.forEach((c) => c.drawLater());
}
