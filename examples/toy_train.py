"""A two-layer character model under four kinds of attention: does the delta show in a short, small run?

    python examples/toy_train.py                    three seeds, four variants, 300 steps (minutes on one core)
    python examples/toy_train.py --text book.txt --steps 1000

exact: FP32 attention. stale, consistent, matched: the article's FP8 blocks with that delta. Same initialisation and data within a seed.
QK RMSNorm with gains, GQA 4/2, 128 tokens. Shown: loss over the last tenth of the steps, its gap to exact, the largest share that one
channel holds of sum_c (g_q,c g_k,c)^2, the largest logit, the median row residual. At this size the losses are expected to agree: the
damage reported at scale takes billions of parameters, and this table says so by being a null. CPU simulation.
"""

import argparse
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _table import Progress, save, table

from dm_plugin.attention import dm_attn_func
from dm_plugin.residuals import gain_share
from dm_plugin.stats import RowStats

VARIANTS = ("exact", "stale", "consistent", "matched")
WIDTH, HEADS, KV_HEADS, TOKENS, BATCH = 128, 4, 2, 128, 4


class Attention(nn.Module):
    """QK-normed grouped-query attention with learned gains."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant, self.dim = variant, WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, self.dim * (HEADS + 2 * KV_HEADS), bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.dim), nn.RMSNorm(self.dim)
        self.stats: RowStats | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.dim)).split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.variant == "exact":
            heads = (x.transpose(1, 2) for x in (q, k, v))
            o = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            o = dm_attn_func(q, k, v, mode=self.variant, fmt="paper", impl="reference", tap=self.keep)
        return self.out(o.flatten(2))

    def keep(self, stats: RowStats) -> None:
        self.stats = stats


class Model(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.attention = nn.ModuleList(Attention(variant) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(5))
        self.read = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight
        for i in range(2):
            x = x + self.attention[i](self.norms[2 * i](x))
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        return self.read(self.norms[4](x))


def text_bytes(path: str | None) -> Tensor:
    """A file, or the standard library's top-level sources."""
    files = [Path(path)] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8).long()


def train(variant: str, seed: int, steps: int, data: Tensor) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Model(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    gen = torch.Generator().manual_seed(seed)
    losses, residuals, logit = [], [], 0.0
    for _ in range(steps):
        starts = torch.randint(len(data) - TOKENS - 1, (BATCH,), generator=gen)
        rows = torch.stack([data[s : s + TOKENS + 1] for s in starts.tolist()])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for a in model.attention:
            if (
                a.stats is not None
                and a.stats.row_sum is not None
                and a.stats.row_abs_sum is not None
                and a.stats.max_logit is not None
            ):
                ratio = (a.stats.row_sum.abs() / a.stats.row_abs_sum)[..., 1:]
                residuals.append(float(ratio.nanmedian()))
                logit = max(logit, float(a.stats.max_logit.max()))
    tail = statistics.fmean(losses[-max(1, steps // 10) :])
    share = max(float(gain_share(a.q_norm.weight.detach(), a.k_norm.weight.detach())) for a in model.attention)
    residual = statistics.median(residuals) if residuals else None
    return {
        "variant": variant,
        "seed": seed,
        "tail": tail,
        "gain_share": share,
        "max_logit": logit or None,
        "residual": residual,
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--text", default=None, help="file to train on; default: the standard library's sources")
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    torch.set_num_threads(1)
    data = text_bytes(args.text)
    bar, runs = Progress(args.seeds * len(VARIANTS), "runs"), []
    for seed in range(args.seeds):
        for variant in VARIANTS:
            runs.append(train(variant, seed, args.steps, data))
            bar.step(f"{variant}, seed {seed}")
    rows = []
    for variant in VARIANTS:
        mine = [r for r in runs if r["variant"] == variant]
        exact = {r["seed"]: r["tail"] for r in runs if r["variant"] == "exact"}
        gaps = [r["tail"] - exact[r["seed"]] for r in mine]
        gap = "-" if variant == "exact" else f"{statistics.fmean(gaps):+.4f} [{min(gaps):+.4f}, {max(gaps):+.4f}]"
        residual = statistics.median(r["residual"] for r in mine) if mine[0]["residual"] is not None else None
        logit = max(r["max_logit"] for r in mine) if mine[0]["max_logit"] is not None else None
        rows.append(
            [
                variant,
                statistics.fmean(r["tail"] for r in mine),
                gap,
                max(r["gain_share"] for r in mine),
                logit,
                residual,
            ]
        )
    table(
        ["attention", "loss", "gap to exact, mean [min, max]", "top gain share", "max logit", "row residual"],
        rows,
        f"{args.steps} steps, {args.seeds} seeds",
    )
    print(f"\nequal gains would give a share of {HEADS / WIDTH:.4f}; row residual: median before the cast")
    save(args.json, "toy_train", {"steps": args.steps, "runs": runs})


if __name__ == "__main__":
    main()
