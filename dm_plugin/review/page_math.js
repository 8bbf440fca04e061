"use strict";
// The worked row in JavaScript: the same formulas, formats and rounding as worked_row.py, tested to agree with it.
const GRIDS = {
  e4m3: { mantissa: 3, minExp: -6, limit: 448 },
  e5m2: { mantissa: 2, minExp: -14, limit: 57344 },
  bf16: { mantissa: 7, minExp: -126, limit: 3.3895313892515355e38 },
};
const MODES = ["stale", "consistent", "matched"];

const bits = new DataView(new ArrayBuffer(8));
function exponentOf(size) { // floor(log2(size)) of a finite positive double, exact; subnormal doubles count as -1023
  bits.setFloat64(0, size);
  return ((bits.getUint32(0) >>> 20) & 0x7ff) - 1023;
}
function roundEven(x) { // nearest integer, ties to even, x >= 0
  const low = Math.floor(x), rest = x - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 === 1) ? low + 1 : low;
}
function roundTo(x, format) { // nearest value of the format, ties to even, saturating; NaN stays NaN
  if (format === "none" || Number.isNaN(x) || x === 0) return x;
  const grid = GRIDS[format], size = Math.abs(x);
  if (size >= grid.limit) return Math.sign(x) * grid.limit;
  const step = 2 ** (Math.max(exponentOf(size), grid.minExp) - grid.mantissa);
  return Math.sign(x) * Math.min(roundEven(size / step) * step, grid.limit);
}
function quantiseBlock(values, format) { // one FP32 scale amax / limit for the block, codes, dequantised
  if (format === "none" || format === "bf16") return values.map((x) => roundTo(x, format));
  const amax = values.reduce((m, x) => Math.max(m, Math.abs(x)), 0);
  const scale = Math.fround(amax / GRIDS[format].limit) || 1;
  return values.map((x) => roundTo(x / scale, format) * scale);
}
const dot = (a, b) => a.reduce((s, x, i) => s + x * b[i], 0);
const total = (a) => a.reduce((s, x) => s + x, 0);
const weigh = (w, rows) => rows[0].map((_, d) => rows.reduce((s, row, j) => s + w[j] * row[d], 0)); // sum_j w_j rows_j

function workRow(row, choice) {
  const top = Math.max(...row.logits);
  const e = row.logits.map((s) => Math.exp(s - top)), norm = total(e);
  const p = e.map((x) => Math.fround(x / norm));
  const pHat = quantiseBlock(e, choice.p).map((x) => x / norm);
  const dim = row.do.length, keys = row.logits.length;
  const centre = row.do.map((_, d) => (choice.centre ? row.v.reduce((s, v) => s + v[d], 0) / keys : 0));
  const flat = quantiseBlock(row.v.flatMap((v) => v.map((x, d) => x - centre[d])), choice.v);
  const vHat = row.v.map((_, j) => flat.slice(j * dim, (j + 1) * dim));
  const doHat = quantiseBlock(row.do, choice.do);
  const o = weigh(pHat, vHat), oStored = quantiseBlock(o, choice.o);
  const dpHat = vHat.map((v) => Math.fround(dot(v, doHat)));
  const stale = choice.mode === "stale", matched = choice.mode === "matched";
  const used = stale ? row.do : doHat;
  const delta = matched
    ? p.reduce((s, x, j) => Math.fround(s + Math.fround(x * dpHat[j])), 0)
    : Math.fround(dot(used, oStored));
  const ds = p.map((x, j) => Math.fround(x * Math.fround(dpHat[j] - delta)));
  const dsHat = quantiseBlock(ds, "e4m3");
  const absSum = total(ds.map(Math.abs)), absSumCast = total(dsHat.map(Math.abs));
  const out = {
    p, pHat, dpHat, delta, ds, dsHat, absSum, absSumCast, rowSum: total(ds), rowSumCast: total(dsHat),
    probability: matched ? 0 : dot(doHat, weigh(p.map((x, j) => x - pHat[j]), vHat)),
    gradient: stale ? dot(doHat.map((x, d) => x - row.do[d]), o) : 0,
    storage: matched ? 0 : dot(used, o.map((x, d) => x - oStored[d])),
  };
  out.ratio = absSum ? Math.abs(out.rowSum) / absSum : 0;
  out.ratioCast = absSumCast ? Math.abs(out.rowSumCast) / absSumCast : 0;
  out.roundOff = out.rowSum - out.probability - out.gradient - out.storage;
  return out;
}

function randomRow(seed, spread, offset) { // Gaussian row from a small seeded generator (mulberry32, Box-Muller)
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  const many = (n) => Array.from({ length: n }, normal);
  const logits = many(8).map((x) => Math.round(x * spread * 100) / 100), dO = many(16).map((x) => roundTo(x, "bf16"));
  const shift = many(16);
  const v = Array.from({ length: 8 }, () => many(16).map((x, d) => roundTo(x + offset * shift[d], "bf16")));
  return { logits, do: dO, v };
}

if (typeof module !== "undefined") module.exports = { roundTo, quantiseBlock, workRow, randomRow, MODES };
