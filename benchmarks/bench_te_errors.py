"""Errors against FP64 of Transformer Engine's BF16 and FP8 attention and of our kernel, when V carries a constant offset.

    python3 benchmarks/bench_te_errors.py [--json FILE]

B=1, T=2048, H 8/2, D=128, causal; q, k, v, dO unit Gaussian in BF16, V plus a fixed vector of std `offset` a key head. Stock FP8 is DelayedScaling
(HYBRID, history 1, most_recent, fp8_dpa); the figures are those of the third call, when its scales have settled. Relative L2 errors of O, dQ,
dK, dV, and sum_c |sum_j dK_jc| / sum_jc |dK_jc|, which is zero in exact arithmetic. O's error is taken relative to O without the offset.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from _record import save  # noqa: E402
from oracle import attention  # noqa: E402

from dm_plugin.formats import SM90  # noqa: E402

OFFSETS = (0.0, 1.0, 4.0, 16.0)
TOKENS, HEADS, KV_HEADS, DIM = 2048, 8, 2, 128
RAW = SM90.with_(center_v=False)
ARMS: dict[str, dict[str, Any]] = {
    "te_bf16": {},
    "te_fp8": {"fp8": True},
    "dm_stale, V not centred": {"mode": "stale", "fmt": RAW},
    "dm_matched, V not centred": {"mode": "matched", "fmt": RAW},
    "dm_stale": {"mode": "stale", "fmt": SM90},
    "dm_matched": {"mode": "matched", "fmt": SM90},
}


def operands(offset: float, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """q, k, v, dO (1, T, heads, D) in BF16 and the offset (1, 1, G, D)."""
    gen = torch.Generator().manual_seed(0)
    draw = lambda h: torch.randn(1, TOKENS, h, DIM, generator=gen)  # noqa: E731
    q, k, v, do = (draw(h) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    shift = offset * torch.randn(1, 1, KV_HEADS, DIM, generator=gen)
    return (*(x.bfloat16().to(device) for x in (q, k, v + shift, do)), shift.to(device))


def measure(name: str, offset: float) -> dict[str, float]:
    import transformer_engine.pytorch as te
    from dm_plugin.integrations.transformer_engine import configure, refresh
    from transformer_engine.common.recipe import DelayedScaling, Format

    arm = ARMS[name]
    os.environ["NVTE_FLASH_ATTN"] = "1" if "mode" in arm else "0"
    if "mode" in arm:
        configure(mode=arm["mode"], fmt=arm["fmt"])
    refresh()
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", fp8_dpa=True)
    *qkv, do, shift = operands(offset)
    truth = attention(*qkv, do, 0)
    leaves = [x.requires_grad_() for x in qkv]
    module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=KV_HEADS, qkv_format="bshd")
    for _ in range(3):
        for x in leaves:
            x.grad = None
        with te.autocast(enabled=bool(arm.get("fp8")), recipe=recipe):
            o = module(*leaves, attn_mask_type="causal")
        o.backward(do.flatten(2))
    grads = {"dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
    out = {n: float((x.double() - getattr(truth, n)).norm() / getattr(truth, n).norm()) for n, x in grads.items()}
    plain = truth.o - shift.repeat_interleave(HEADS // KV_HEADS, 2)
    out["o"] = float((o.detach().view_as(truth.o).double() - truth.o).norm() / plain.norm())
    dk = grads["dk"].float()
    return out | {"key_column": float(dk.sum(1).abs().sum() / dk.abs().sum())}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", default=None)
    args = p.parse_args()
    from dm_plugin.integrations.transformer_engine import install

    install()
    rows = []
    for offset in OFFSETS:
        for name in ARMS:
            rows.append(
                {"arm": name, "offset": offset, **{k: float(f"{x:.4g}") for k, x in measure(name, offset).items()}}
            )
            print("  ".join(f"{x:>26}" if isinstance(x, str) else f"{x:9.3g}" for x in rows[-1].values()))
    shape = {"batch": 1, "tokens": TOKENS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "causal": True}
    save(args.json, "bench_te_errors", {"shape": shape | {"dtype": "bfloat16"}, "rows": rows})


if __name__ == "__main__":
    main()
