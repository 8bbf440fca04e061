"""Dumps with known contents, written by safetensors alone, for tests of the review side and its benchmark.

Row ratios are log-normal around a median that the caller sets per arm, so every figure a review prints can be
computed here by hand. `python tests/fake_dumps.py DIR --steps 1000 --layers 48` writes a large directory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save, save_file

CENTRES = -10 + (np.arange(240) + 0.5) / 20  # log10 centre of each bin
ROWS = 4096
BUCKETS = np.array([0.55, 0.25, 0.12, 0.05, 0.03])  # share of rows by top probability


@dataclass(frozen=True)
class Kind:
    """What one arm does: medians of the row ratio before and after the cast, and what else sets it apart."""

    pre: float = 1.4e-7
    post: float = 2.7e-3
    key: float = 1.5e-3
    tail: float = 1.0  # growth of the ratio per top-probability bucket
    logit: float = 20.0
    saturated: float = 0.0
    replayed: bool = False
    tap: bool = True  # False: a backend seen only from outside (no row sums)
    backend: str = "reference:sm90:matched"


KINDS = {
    "matched": Kind(),
    "stale": Kind(1.1e-2, 1.2e-2, 4e-3, 3.0, 60.0, backend="reference:sm90:stale"),
    "consistent": Kind(2.5e-3, 3.9e-3, 2e-3, 1.6, 30.0, backend="reference:sm90:consistent"),
    "stock": Kind(1.8e-2, 2.0e-2, 1.3e-2, 3.5, 90.0, 2e-4, backend="reference:stock:stale"),
    "bf16": Kind(key=4e-4, tap=False, backend="torch:sdpa_bf16"),
}


def site_name(layer: int) -> str:
    return f"decoder.layers.{layer}.self_attention.core_attention"


def lognormal_hist(median: float, n: int = ROWS, sigma: float = 0.35) -> np.ndarray:
    """Histogram [242] of n rows whose log10 ratio is normal around log10(median)."""
    weight = np.exp(-0.5 * ((CENTRES - np.log10(median)) / sigma) ** 2)
    out = np.zeros(242, np.int64)
    out[1:241] = np.round(weight / weight.sum() * n)
    return out


def site_fields(
    kind: Kind, rng: np.random.Generator, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """All fields of one site at one step (SEAMS key table), without the site prefix."""
    out: dict[str, np.ndarray] = {}
    wobble = float(10 ** rng.normal(0, 0.04))
    if kind.tap:
        for probe, base in (("row_sum_pre", kind.pre), ("row_sum_post", kind.post)):
            median = base * wobble * (scale if probe == "row_sum_pre" or kind.pre > 1e-3 else 1.0)
            den = rng.uniform(90, 110, heads)
            out[f"{probe}.num"], out[f"{probe}.den"] = den * median * 1.2, den
            out[f"{probe}.count"] = np.full(heads, ROWS, np.int64)
            out[f"{probe}.excluded"] = np.full(heads, 8, np.int64)
            tops = [lognormal_hist(median * kind.tail**i, int(ROWS * heads * b)) for i, b in enumerate(BUCKETS)]
            out[f"{probe}.hist_top_p"] = np.stack(tops)
            out[f"{probe}.hist"] = np.sum(tops, 0)
        sharp = int(ROWS * (0.5 + 0.02 * kind.tail))
        out["row_sum_signed.sharpened"] = np.full(heads, sharp, np.int64)
        out["row_sum_signed.flattened"] = np.full(heads, ROWS - sharp, np.int64)
        out["row_sum_signed.entropy_sharpened"] = np.full(heads, sharp * 2.1)
        out["row_sum_signed.entropy_flattened"] = np.full(heads, (ROWS - sharp) * 2.9)
        out["delta_gap.num"] = np.full(heads, kind.pre * wobble * scale * 30.0)
        out["delta_gap.den"] = np.full(heads, 30.0)
        out["delta_gap.count"] = np.full(heads, ROWS, np.int64)
        out["delta_gap.hist"] = lognormal_hist(kind.pre * wobble * scale, ROWS * heads)
        out["max_logit.max"] = kind.logit * rng.uniform(0.8, 1.0, heads)
        out["entropy.num"], out["entropy.count"] = np.full(heads, ROWS * 2.4), np.full(heads, ROWS, np.int64)
        for code in ("q", "k", "v", "p", "do", "ds"):
            count = ROWS * dim
            out[f"codes.{code}.amax"] = np.asarray(rng.uniform(1, 4))
            out[f"codes.{code}.saturated"] = np.asarray(int(count * kind.saturated), np.int64)
            out[f"codes.{code}.underflowed"] = np.asarray(int(count * (0.02 if code in "pds" else 0.001)), np.int64)
            out[f"codes.{code}.nonfinite"] = np.asarray(0, np.int64)
            out[f"codes.{code}.count"] = np.asarray(count, np.int64)
    if kind.replayed:
        for arm, median in (("stale", 1.1e-2), ("consistent", 2.5e-3), ("matched", 1.4e-8), ("stock", 1.8e-2)):
            probe = f"replay_{arm}"
            out[f"{probe}.num"], out[f"{probe}.den"] = np.full(2, median), np.ones(2)
            out[f"{probe}.count"], out[f"{probe}.excluded"] = np.full(2, ROWS, np.int64), np.zeros(2, np.int64)
            out[f"{probe}.hist"] = lognormal_hist(median)
            out[f"{probe}.gap_num"], out[f"{probe}.gap_den"] = np.full(2, median), np.ones(2)
            out[f"{probe}.col_num"], out[f"{probe}.col_den"] = np.full((1, dim), median / 4), np.ones((1, dim))
            for name, error in (("dq", 0.064), ("dk", 0.063), ("dv", 0.05)):
                out[f"{probe}.{name}_num"], out[f"{probe}.{name}_den"] = np.full(2, error**2), np.ones(2)
            out[f"{probe}.push"], out[f"{probe}.push_sharpened"] = np.full(dim, median), np.full(dim, 0.75 * median)
            out[f"{probe}.push_abs"] = np.full(dim, median)
    den = rng.uniform(5, 15, (kv_heads, dim))
    channel = 1 + 6 * np.exp(-0.5 * ((np.arange(dim) - dim // 3) / 1.5) ** 2) * (kind.key > 3e-3)
    out["key_col_sum.num"] = den * kind.key * scale * wobble * channel
    out["key_col_sum.den"] = den
    out["key_col_sum.count"] = np.asarray(2, np.int64)
    gain = np.ones(dim)
    gain[dim // 3] = 2.0 + (kind.pre > 1e-3)
    out["gain_share.q"], out["gain_share.k"] = gain, gain * 1.1
    out["records.count"] = np.asarray(2, np.int64)
    return out


def metadata(step: int, rank: int = 0, backend: str = "reference:sm90:matched", **extra: str) -> dict[str, str]:
    base = {
        "format": "pt",
        "dm_plugin.schema": "1",
        "dm_plugin.version": "0.1.0",
        "dm_plugin.step": str(step),
        "dm_plugin.rank": str(rank),
        "dm_plugin.world": json.dumps({"tp": {"rank": 0, "size": 1}}),
        "dm_plugin.backend": backend,
        "dm_plugin.model": json.dumps({"layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16}),
        "dm_plugin.config": "{}",
        "dm_plugin.lost": "0",
        "dm_plugin.reasons": "{}",
        "dm_plugin.impl_reason": "no GPU: reference",
    }
    return base | {f"dm_plugin.{k}": v for k, v in extra.items()}


def dump_path(dumps: Path, step: int, rank: int = 0) -> Path:
    return dumps / f"iter_{step:07d}" / f"rank_{rank:05d}.safetensors"


def write_dump(
    dumps: Path, step: int, tensors: dict[str, np.ndarray], *, rank: int = 0, meta: dict | None = None
) -> Path:
    path = dump_path(dumps, step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path, meta or metadata(step, rank))
    return path


def write_arm(
    root: Path,
    name: str,
    *,
    kind: Kind | None = None,
    steps: Sequence[int] = range(0, 40, 10),
    layers: int = 4,
    layer_kind: Callable[[int], Kind] | None = None,
    shape: tuple[int, int, int] = (4, 2, 16),
    seed: int = 0,
    losses: int = 40,
) -> Path:
    """One arm: arm.json, train.jsonl and dumps. `layer_kind(layer)` plants a fault in chosen layers."""
    kind = kind or KINDS[name]
    rng = np.random.default_rng(seed)
    arm = root / name
    arm.mkdir(parents=True, exist_ok=True)
    about = {"name": name, "label": name, "description": f"fake {name}", "backend": kind.backend, "steps": losses}
    (arm / "arm.json").write_text(json.dumps(about))
    with (arm / "train.jsonl").open("w") as file:
        for step in range(losses):
            worse = 0.25 * (step / losses) ** 2 if kind.pre > 5e-3 and kind.tap else 0.0
            loss = 2.2 + 3.3 * np.exp(-step / (losses / 4)) + worse + rng.normal(0, 0.03)
            norm = float(np.exp(rng.normal(0, 0.2)))
            file.write(
                json.dumps({"step": step, "loss": round(loss, 4), "grad_norm": round(norm, 4), "time": 0.1}) + "\n"
            )
    heads, kv_heads, dim = shape
    for i, step in enumerate(steps):
        tensors = {}
        for layer in range(layers):
            chosen = layer_kind(layer) if layer_kind else kind
            scale = (1 + layer / layers) * (1 + 2 * i / max(len(steps), 1)) if chosen.pre > 1e-3 else 1.0
            fields = site_fields(chosen, rng, heads=heads, kv_heads=kv_heads, dim=dim, scale=scale)
            tensors |= {f"{site_name(layer)}/{field}": value for field, value in fields.items()}
        write_dump(arm / "dumps", step, tensors, meta=metadata(step, backend=kind.backend))
    return arm


def write_run(root: Path, names: Sequence[str] = ("bf16", "stock", "stale", "matched"), **kwargs) -> Path:
    for i, name in enumerate(names):
        write_arm(root, name, seed=i, **kwargs)
    return root


def write_big(root: Path, *, steps: int = 1000, layers: int = 48) -> int:
    """A large dump directory quickly: one serialised file whose step digits and values change. Returns bytes."""
    rng = np.random.default_rng(0)
    total = 0
    variants = []
    for kind in (KINDS["matched"], KINDS["stale"]):
        tensors = {}
        for layer in range(layers):
            fields = site_fields(kind, rng, heads=16, kv_heads=1, dim=64)
            tensors |= {f"{site_name(layer)}/{field}": value for field, value in fields.items()}
        variants.append(tensors)
    for step in range(steps):
        blob = save(variants[step % 2], metadata(step))
        path = dump_path(root, step)
        path.parent.mkdir(parents=True)
        path.write_bytes(blob)
        total += len(blob)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=48)
    args = parser.parse_args()
    print(f"{write_big(args.out, steps=args.steps, layers=args.layers) / 2**20:.0f} MiB in {args.out}")
