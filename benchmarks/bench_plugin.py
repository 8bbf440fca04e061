"""What the Transformer Engine layer itself costs: te.DotProductAttention with our kernel behind it against dm_attn_func called directly.

    python3 benchmarks/bench_plugin.py [--json FILE]

One arm is a forward and a backward. `queued`: microseconds a call when many calls are queued without waiting (what a training step sees);
`host`: microseconds of Python a call, from a size so small that the GPU is never the limit. `layer` is our attention class with Transformer
Engine's arguments, without its wrapper; `te_ours` and `te_bf16` are the whole te.DotProductAttention with our and with its own backend.
Median over rounds; a round runs every arm once, in order.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from _record import save  # noqa: E402

SIZES = {"host": (128, 1, 8, 2), "queued": (8192, 1, 64, 8)}  # tokens, batch, heads, key heads


def arms(tokens: int, batch: int, heads: int, kv_heads: int) -> dict[str, Callable[[], Any]]:
    import transformer_engine.pytorch as te
    from dm_plugin.integrations import transformer_engine as plugin
    from dm_plugin.integrations.transformer_engine.selector import OURS

    from dm_plugin import dm_attn_func

    draw = lambda h: torch.randn(tokens, batch, h, 128, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = (draw(h).requires_grad_() for h in (heads, kv_heads, kv_heads))
    do = draw(heads).flatten(2)
    ours, stock = (te.DotProductAttention(heads, 128, num_gqa_groups=kv_heads, qkv_format="sbhd") for _ in range(2))
    given = {
        "attn_mask_type": "causal",
        "qkv_layout": "sbhd_sbhd_sbhd",
        "flash_attention_backend": OURS,
        "cp_group": None,
    }

    def through(module: Any, flash: str) -> Callable[[], Any]:
        def call() -> Any:
            if os.environ.get("NVTE_FLASH_ATTN") != flash:
                os.environ["NVTE_FLASH_ATTN"] = flash
                plugin.refresh()
            return torch.autograd.grad(module(q, k, v, attn_mask_type="causal"), (q, k, v), do)

        return call

    def direct() -> Any:
        o = dm_attn_func(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1).flatten(2).contiguous()
        return torch.autograd.grad(o, (q, k, v), do)

    return {
        "dm_attn_func": direct,
        "layer": lambda: torch.autograd.grad(ours.flash_attention(q, k, v, **given), (q, k, v), do),
        "te_ours": through(ours, "1"),
        "te_bf16": through(stock, "0"),
    }


def measure(calls: dict[str, Callable[[], Any]], rounds: int, repeat: int) -> dict[str, float]:
    """Median microseconds a call; each sample is `repeat` calls queued, then one wait."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            torch.cuda.synchronize()
            samples[name].append(1e6 * (time.perf_counter() - began) / repeat)
    return {name: round(statistics.median(x[1:]), 1) for name, x in samples.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--json", default=None)
    args = p.parse_args()
    from dm_plugin.integrations.transformer_engine import install

    install()
    out = {kind: measure(arms(*size), args.rounds, 20 if kind == "host" else 4) for kind, size in SIZES.items()}
    for kind, numbers in out.items():
        base = numbers["dm_attn_func"]
        print(f"{kind} {SIZES[kind]}: " + "  ".join(f"{n} {x} us ({x / base - 1:+.1%})" for n, x in numbers.items()))
    names = ("tokens", "batch", "heads", "kv_heads")
    shapes = {kind: dict(zip(names, size, strict=True), head_dim=128) for kind, size in SIZES.items()}
    save(args.json, "bench_plugin", {"shapes": shapes, "microseconds": out})


if __name__ == "__main__":
    main()
