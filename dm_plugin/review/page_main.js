"use strict";
// State, finding, overview ruler, verdict list and layer map. The view lives in the address (#arm=..&layer=..).
const DATA = JSON.parse(document.getElementById("data").textContent);
for (const m of Object.values(DATA.measures)) m.definition = m.definition.replaceAll("sum_j", "Σⱼ").replaceAll("sum_c", "Σ_c").replaceAll("dS_ij", "dSᵢⱼ").replaceAll("dK_jc", "dKⱼc").replaceAll("^2", "²");
const ZONES = [[1e-11, 1e-5, "ok", "matches"], [1e-5, 1e-3, "watch", "drifts"], [1e-3, 1e2, "bad", "does not match"]]; // of the solid mark
const MAP_NAMES = { "row_sum_pre.median": "row residual before the cast", "row_sum_post.median": "row residual after the cast", "key_col_sum.ratio": "key-gradient columns", "delta_gap.ratio": "gap between the delta used and the matched one", "max_logit.max": "largest logit", "entropy.mean": "entropy of the rows", "gain_share.top1": "largest channel's gain share" };
const SHOWN = 10;
const view = { arm: 0, site: null, metric: "row_sum_pre.median", all: false };
const $ = (id) => document.getElementById(id);
const arms = DATA.arms;
const shortName = (arm) => clip(arm.label.length <= 14 ? arm.label : arm.name.split("/").pop(), 16); // beside lines
const overallOf = (arm, key) => (arm.overall || {})[key];
const worstArm = () => arms.reduce((w, a, i) => (score(a) > score(arms[w]) ? i : w), 0);
function score(arm) { const v = arm.verdicts[0]; return v ? (v.level === "bad" ? 10 : v.level === "watch" ? 5 : 0) + (v.score || 0) : -1; }
function siteName() { return view.site; }
function siteIndex(arm) { return arm.sites.indexOf(view.site); }

function finding() {
  const seen = arms.filter((a) => finite(overallOf(a, "row_sum_pre.median")));
  const box = $("finding");
  if (!seen.length) {
    const keyed = arms.filter((a) => finite(overallOf(a, "key_col_sum.ratio")));
    const best = keyed.length ? keyed.map((a) => `${a.label} ${fmt(overallOf(a, "key_col_sum.ratio"))}`).join(", ") : "";
    box.textContent = best ? `No row sums were recorded; key columns cancel to ${best} of their size.` : "No residuals were recorded in these dumps.";
    return;
  }
  const sorted = [...seen].sort((a, b) => overallOf(b, "row_sum_pre.median") - overallOf(a, "row_sum_pre.median"));
  const worst = sorted[0], best = sorted[sorted.length - 1], w = overallOf(worst, "row_sum_pre.median"), b = overallOf(best, "row_sum_pre.median");
  const parts = [el("strong", { class: `c${worst.colour}`, style: "color:var(--c)" }, worst.label), ` leaves ${fmt(w)} of the median gradient row uncancelled before any cast`];
  if (seen.length > 1 && w / b >= 1.5) parts.push("; ", el("strong", { class: `c${best.colour}`, style: "color:var(--c)" }, best.label), ` leaves ${fmt(b)}, ${times(w / b)} less`);
  const faulty = arms.flatMap((a) => a.verdicts.filter((v) => v.level === "bad").map((v) => [a, v]));
  parts.push(". ");
  const single = arms.find((a) => { const n = a.verdicts.filter((v) => v.level === "bad").length; return n && n <= 3 && a.sites.length > 4 * n; });
  if (single) {
    const named = single.verdicts.filter((v) => v.level === "bad").map((v) => single.names[v.site]).join(", ");
    parts.push(`In ${single.label} the fault sits in ${named} alone (${fmt(single.verdicts[0].score)}).`);
  } else if (!faulty.length) parts.push("Every layer is below the line at which a delta stops matching.");
  box.replaceChildren(...parts);
}
function times(x) { return x >= 1e4 ? `${(x / 1e3).toPrecision(2).replace(/\.0$/, "") * 1}`.replace(/$/, ",000 times") : `${Number(x.toPrecision(2))} times`; }

function rulerChart() {
  const box = $("ruler"), width = box.clientWidth || 900, narrow = width < 560, rowH = narrow ? 60 : 46;
  const f = frame(width, 46 + rowH * arms.length + 28, "Residual of each arm on a log axis; values in the table below", [34, narrow ? 14 : 30, 34, narrow ? 10 : 200]);
  const keys = ["row_sum_pre.median", "row_sum_post.median", "key_col_sum.ratio"];
  const [low, high] = extent(arms.map((a) => keys.map((k) => overallOf(a, k))), true);
  const sx = logScale([Math.min(low, 1e-8), Math.max(high, 0.1)], f.x);
  for (const [a, b, name, word] of ZONES) {
    const l = sx(Math.max(a, sx.domain[0])), r = sx(Math.min(b, sx.domain[1]));
    f.root.append(svg("rect", { class: `zone ${name}`, x: l, width: Math.max(0, r - l), y: f.y[1] - 8, height: f.y[0] - f.y[1] + 8 }),
      svg("text", { class: `zone-name ${name}`, x: (l + r) / 2, y: f.y[1] - 14, "text-anchor": "middle" }, word));
  }
  for (const [value, text] of sx.ticks) f.root.append(svg("line", { class: "tick", x1: sx(value), x2: sx(value), y1: f.y[0], y2: f.y[0] + 4 }), svg("text", { x: sx(value), y: f.y[0] + 18, "text-anchor": "middle" }, text));
  arms.forEach((arm, i) => {
    const y = f.y[1] + rowH * (i + 0.5) + (narrow ? 2 : 5), c = arm.colour, [pre, post, key] = keys.map((k) => overallOf(arm, k));
    if (!finite(pre)) f.root.append(svg("rect", { class: "unjudged", x: f.x[0], width: f.x[1] - f.x[0], y: f.y[1] + rowH * i - (i ? 0 : 8), height: rowH + (i ? 0 : 8) }));
    f.root.append(svg("text", { class: `name c${c}`, style: "font-size:14px", x: narrow ? f.x[0] + 4 : f.x[0] - 12, y: narrow ? y - 15 : y + 5, "text-anchor": narrow ? "start" : "end" }, svg("title", {}, arm.label), clip(arm.label, narrow ? 38 : 23)));
    if (finite(pre) && finite(post)) f.root.append(svg("line", { class: `link c${c}`, x1: sx(pre), x2: sx(post), y1: y, y2: y }));
    if (finite(key)) f.root.append(svg("line", { class: `strip c${c}`, x1: sx(key), x2: sx(key), y1: y - 9, y2: y + 9 }));
    if (finite(post)) f.root.append(mark(c, sx(post), y, true, 1.4));
    if (finite(pre)) f.root.append(mark(c, sx(pre), y, false, 1.7));
    const left = finite(pre) ? pre : key;
    if (!finite(left)) f.root.append(svg("text", { x: f.x[0] + 8, y: y + 4 }, "no residual recorded"));
    else f.root.append(svg("text", { class: "ink", style: "font-weight:650;font-size:13px", x: Math.max(f.x[0] + 22, Math.min(f.x[1] - 22, sx(left))), y: narrow ? y + 21 : y - 12, "text-anchor": "middle" }, fmt(left)));
  });
  box.replaceChildren(f.root);
  const cell = (a, k) => fmt(overallOf(a, k));
  $("ruler-table").replaceChildren(el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "arms in numbers" }, tableOf(
    ["arm", "backend", "row before cast", "row after cast", "key column", "max logit", "loss at step", "steps", "layers"],
    arms.map((a) => [el("span", {}, el("span", { class: `key c${a.colour}` }), a.label), a.backend || "–", ...keys.map((k) => cell(a, k)), cell(a, "max_logit.max"), a.curve ? `${fmt(a.curve.tail, 4)} at ${a.curve.step[a.curve.step.length - 1]}` : "–", a.first.length ? `${a.first[0]}–${a.last[a.last.length - 1]}` : "none", String(a.sites.length)]))));
}
function clip(text, n) { return text.length > n ? `${text.slice(0, n - 1)}…` : text; }

function armTabs() {
  $("arm-tabs").replaceChildren(...arms.map((a, i) => el("button", { type: "button", "aria-pressed": String(i === view.arm), onclick: () => { view.arm = i; view.site = a.verdicts.length ? a.sites[a.verdicts[0].site] : view.site; draw(); $("arm-tabs").children[i].focus(); } }, el("span", { class: `key c${a.colour}` }), a.label)));
  const a = arms[view.arm];
  const steps = a.recentSteps.length ? ` Verdicts rest on steps ${a.recentSteps[0]}–${a.recentSteps[1]}, the latest quarter of those probed; the last column is that quarter against the first.` : "";
  $("arm-meta").textContent = `${a.backend || "backend not stated"}; ${a.files} dump files (${a.megabytes} MiB) of ${a.ranks} rank${a.ranks === 1 ? "" : "s"}${a.lost ? `; ${a.lost} records were lost before they could be written` : ""}.${steps}${a.implReason ? ` Backend chosen because: ${a.implReason}.` : ""}`;
  $("refused").replaceChildren(...(a.reasons.length ? [el("details", { class: "table" }, el("summary", {}, `${a.reasons.length} probe${a.reasons.length > 1 ? "s" : ""} not recorded, with the reason`), el("ul", {}, a.reasons.map((r) => el("li", {}, `${r.probe}: ${r.reason} (first at ${r.site})`))))] : []));
}
function miniRuler(arm, site) {
  const f = frame(190, 20, "", [2, 6, 2, 6]), sx = logScale([1e-8, 1], f.x);
  f.root.setAttribute("aria-hidden", "true"); f.root.setAttribute("class", "chart ruler");
  const [pre, post, key] = ["row_sum_pre.median", "row_sum_post.median", "key_col_sum.ratio"].map((k) => (arm.now[k] || [])[site]);
  for (const [a, b, name] of ZONES) { const l = sx(Math.max(a, 1e-8)), r = sx(Math.min(b, 1)); f.root.append(svg("rect", { class: finite(pre) ? `zone ${name}` : "nodata", x: l, width: r - l, y: 5, height: 10 })); }
  const at = (x) => sx(Math.min(x, 1));
  if (finite(pre) && finite(post)) f.root.append(svg("line", { class: `link c${arm.colour}`, x1: at(pre), x2: at(post), y1: 10, y2: 10 }));
  if (!finite(pre) && finite(key)) f.root.append(svg("line", { class: `strip c${arm.colour}`, x1: at(key), x2: at(key), y1: 4, y2: 16 }));
  if (finite(post)) f.root.append(mark(arm.colour, at(post), 10, true, 0.9));
  if (finite(pre)) f.root.append(mark(arm.colour, at(pre), 10));
  return f.root;
}
function verdictList() {
  const arm = arms[view.arm], rows = view.all ? arm.verdicts : arm.verdicts.slice(0, SHOWN);
  $("verdicts").replaceChildren(...rows.map((v) => el("li", {}, el("button", { type: "button", "aria-pressed": String(arm.sites[v.site] === view.site), title: arm.sites[v.site], onclick: (e) => choose(arm.sites[v.site], e.detail === 0 ? null : "detail") },
    el("span", { class: "site" }, arm.names[v.site]), el("span", { class: `pill ${v.level}` }, DATA.words[v.level]), miniRuler(arm, v.site), el("span", { class: "say" }, v.text), el("span", { class: "trend", title: "latest quarter / first quarter of the probed steps" }, finite(v.trend) ? `× ${fmt(v.trend, 2)}` : "")))));
  if (!rows.length) $("verdicts").replaceChildren(el("li", {}, el("p", { style: "padding:0 16px" }, "This arm has no dumps; only its training curve is shown.")));
  $("more").hidden = arm.verdicts.length <= SHOWN;
  $("more").textContent = view.all ? `Show the worst ${SHOWN}` : `Show all ${arm.verdicts.length} layers`;
}
$("more").addEventListener("click", () => { view.all = !view.all; verdictList(); });

const MAPS = ["row_sum_pre.median", "row_sum_post.median", "key_col_sum.ratio", "delta_gap.ratio", "max_logit.max", "entropy.mean", "gain_share.top1"];
function layerMap() {
  const arm = arms[view.arm], have = MAPS.filter((k) => arm.series[k]);
  if (!have.length) { $("map").replaceChildren(el("p", { class: "note" }, "Nothing to map for this arm.")); $("map-metric").replaceChildren(); $("map-caption").textContent = ""; $("map-table").replaceChildren(); return; }
  const key = have.includes(view.metric) ? view.metric : have[0], grid = arm.series[key];
  $("map-metric").replaceChildren(...have.map((k) => el("option", { value: k, selected: k === key }, MAP_NAMES[k])));
  const [low, high] = extent(arms.flatMap((a) => a.series[key] || []), true);
  const split = key === "row_sum_pre.median" || key === "delta_gap.ratio";
  const range = split ? [1e-8, 1] : [10 ** (Math.floor(Math.log10(low) * 2) / 2), 10 ** (Math.ceil(Math.log10(high) * 2 + 1e-6) / 2)];
  heatMap($("map"), { label: `${MAP_NAMES[key]} by layer and step, ${arm.label}`, grid, rows: arm.names, columns: arm.last, columnWord: "step", range, ramp: split ? "split" : "seq", selected: siteIndex(arm),
    pick: (r, keyboard) => choose(arm.sites[r], keyboard ? null : "detail"), describe: (r, c, v) => `${arm.names[r]}, step ${arm.first[c] === arm.last[c] ? arm.last[c] : `${arm.first[c]}–${arm.last[c]}`}: ${fmt(v, 3)}` });
  $("map-caption").textContent = `Each cell: ${DATA.measures[key].definition}. One row a layer, one column a probed step${arm.first.some((x, i) => x !== arm.last[i]) ? " (neighbouring steps merged by addition)" : ""}; the colour scale is the same for every arm${split ? ", and turns from blue to orange at 10⁻⁴" : ""}.`;
  $("map-table").replaceChildren(tableToggle(() => tableOf(["step", ...arm.names], arm.last.map((s, i) => [String(s), ...grid.map((row) => fmt(row[i]))]))));
}
$("map-metric").addEventListener("change", (e) => { view.metric = e.target.value; layerMap(); keep(); });

function choose(site, jump) {
  view.site = site;
  verdictList(); layerMap(); drawDetail(); keep();
  if (jump) $(jump).scrollIntoView();
}
function keep() { history.replaceState(null, "", `#arm=${encodeURIComponent(arms[view.arm].name)}&site=${encodeURIComponent(view.site || "")}&map=${view.metric}`); }
function restore() {
  const given = new URLSearchParams(location.hash.slice(1));
  view.arm = arms.findIndex((a) => a.name === given.get("arm"));
  if (view.arm < 0) view.arm = worstArm();
  const arm = arms[view.arm] || { sites: [], verdicts: [] };
  view.site = arm.sites.includes(given.get("site")) ? given.get("site") : arm.verdicts.length ? arm.sites[arm.verdicts[0].site] : null;
  if (given.get("map") in DATA.measures) view.metric = given.get("map");
}
function glossary() {
  $("glossary").replaceChildren(...Object.values(DATA.measures).flatMap((m) => [el("dt", {}, m.label), el("dd", {}, `${m.definition}.`)]));
}
function theme(next) { document.documentElement.dataset.theme = next; try { localStorage.setItem("dm-theme", next); } catch { /* private mode */ } }
function startTheme() {
  let kept = null;
  try { kept = localStorage.getItem("dm-theme"); } catch { /* private mode */ }
  const dark = matchMedia("(prefers-color-scheme: dark)");
  document.documentElement.dataset.theme = kept || (dark.matches ? "dark" : "light");
  dark.addEventListener("change", (e) => { if (!kept) document.documentElement.dataset.theme = e.matches ? "dark" : "light"; });
  $("theme").addEventListener("click", () => { kept = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; theme(kept); });
}
function draw() { armTabs(); verdictList(); layerMap(); drawDetail(); keep(); }
function drawAll() { rulerChart(); armTabs(); verdictList(); layerMap(); drawDetail(); drawTraining(); }
