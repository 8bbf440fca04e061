"""Associative recall: a task on which the delta alone decides whether FP8 attention learns.

    python examples/recall.py                 four arms, five seeds, two processes (a few minutes)
    python examples/recall.py --full          all nine arms        --v-off 0 4 16      the dose        --plain      the null task
    python examples/recall.py --stack te      on a Hopper GPU: Transformer Engine's own BF16 and FP8 attention, and our kernel in its place

One layer, one head, width 64, 64 tokens: an anchor symbol, 31 (key, value) tokens, then queries (name the value of this key) alternating
with '?' rows (name the anchor). Half of the '?' labels are random, so gradients stay loud on rows whose softmax is saturated. V carries a
fixed random offset of std v_off, subtracted again after attention: in exact arithmetic exactly nothing. What is measured is the loss on
the query rows over the last 50 of 800 steps; chance is ln 32 = 3.47; failed means above 0.05.

The task was tuned to separate the arms and v_off 16 is extreme. It shows that the delta is enough to cause the failure and to cure it, not
what trained models contain. CPU simulation of the formats; `stock` emulates Transformer Engine's DelayedScaling attention.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from _table import Progress, save, table

from dm_plugin.attention import dm_attn_func
from dm_plugin.formats import PAPER, STOCK, STOCK_CURRENT, Format

SYMBOLS, KEYS, PAIRS, WIDTH, TOKENS, BATCH, STEPS, TAIL = 32, 32, 31, 64, 64, 16, 800, 50
FAILED = 0.05


class Kind(NamedTuple):
    """An arm: operand format (None: exact FP32 attention) and delta."""

    label: str
    fmt: Format | None
    mode: str


PAPER_E4M3_O = PAPER.with_(o_saved="e4m3")
ARMS = {
    "exact": Kind("exact", None, ""),
    "paper-matched": Kind("paper blocks, matched", PAPER, "matched"),
    "paper-stale": Kind("paper blocks, stale (BF16 O)", PAPER, "stale"),
    "paper-o8-stale": Kind("paper blocks, O in E4M3, stale", PAPER_E4M3_O, "stale"),
    "paper-o8-matched": Kind("same casts, matched", PAPER_E4M3_O, "matched"),
    "stock": Kind("stock", STOCK, "stale"),
    "stock-matched": Kind("stock casts, matched delta", STOCK, "matched"),
    "stock-centred": Kind("stock casts, V centred", STOCK.with_(center_v=True), "stale"),
    "stock-current": Kind("stock_current (O in BF16)", STOCK_CURRENT, "stale"),
}
DEFAULT = ("exact", "stock", "stock-matched", "stock-centred")


class Job(NamedTuple):
    arm: str
    seed: int
    v_off: float
    plain: bool
    steps: int


class Recall(nn.Module):
    """Embeddings of anchor, pairs, queries and '?', one attention head, a linear read-out of the 32 symbols."""

    def __init__(self, v_off: float, seed: int) -> None:
        super().__init__()
        self.anchor, self.value = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(SYMBOLS, WIDTH)
        self.key, self.query = nn.Embedding(KEYS, WIDTH), nn.Embedding(KEYS + 1, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.read = nn.Linear(WIDTH, SYMBOLS)
        gen = torch.Generator().manual_seed(10_000 + seed)
        self.register_buffer("offset", v_off * torch.randn(WIDTH, generator=gen))

    def forward(self, x: Tensor, kind: Kind, logits: list[float] | None = None) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(2).split(WIDTH, dim=-1)  # [B, T, 1, D]
        o = attend(q, k, v + self.offset, kind) - self.offset
        if logits is not None:
            s = (q[:, :, 0] @ k[:, :, 0].transpose(1, 2) * WIDTH**-0.5).detach()
            logits.append(float(s.masked_fill(hidden(), -math.inf).max()))
        return self.read(x + self.out(o[:, :, 0]))

    def embed(self, anchor: Tensor, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """[B, T, WIDTH] of anchor [B], keys and values [B, PAIRS], asked [B, TOKENS - 1 - PAIRS] (KEYS stands for '?')."""
        pairs = self.key(keys) + self.value(values)
        return torch.cat([self.anchor(anchor)[:, None], pairs, self.query(asked)], 1)


def hidden() -> Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


def attend(q: Tensor, k: Tensor, v: Tensor, kind: Kind) -> Tensor:
    if kind.fmt is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return dm_attn_func(q, k, v, mode=kind.mode, fmt=kind.fmt, impl="reference")


def draw(gen: torch.Generator, plain: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(anchor, keys, values, asked, labels) of one batch; asked rows alternate query and '?' (queries only when plain)."""
    anchor = torch.randint(SYMBOLS, (BATCH,), generator=gen)
    keys = torch.rand(BATCH, KEYS, generator=gen).argsort(1)[:, :PAIRS]
    values = torch.randint(SYMBOLS, (BATCH, PAIRS), generator=gen)
    rows = TOKENS - 1 - PAIRS
    pick = torch.randint(PAIRS, (BATCH, rows), generator=gen)
    asked, labels = keys.gather(1, pick), values.gather(1, pick)
    if not plain:
        noise = torch.randint(SYMBOLS, (BATCH, rows), generator=gen)
        coin = torch.rand(BATCH, rows, generator=gen) < 0.5
        name = torch.where(coin, noise, anchor[:, None].expand(-1, rows))
        question = (torch.arange(rows) % 2 == 1).expand(BATCH, -1)
        asked, labels = asked.masked_fill(question, KEYS), torch.where(question, name, labels)
    return anchor, keys, values, asked, labels


def train(job: Job) -> dict[str, Any]:
    """One run: tail loss on the query rows, the largest logit on the way, seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    kind = ARMS[job.arm]
    model = Recall(job.v_off, job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    gen = torch.Generator().manual_seed(1000 + job.seed)
    losses: list[float] = []
    logits: list[float] = []
    began = time.perf_counter()
    for step in range(job.steps):
        anchor, keys, values, asked, labels = draw(gen, job.plain)
        x = model.embed(anchor, keys, values, asked)
        scores = model(x, kind, logits if step % 20 == 19 else None)[:, 1 + PAIRS :]
        each = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").reshape(
            labels.shape
        )
        optimizer.zero_grad(set_to_none=True)
        each.mean().backward()
        optimizer.step()
        losses.append(float(each.detach()[asked != KEYS].mean()))
    tail = statistics.fmean(losses[-TAIL:])
    seconds = time.perf_counter() - began
    return {
        **job._asdict(),
        "tail": tail,
        "failed": not tail <= FAILED,
        "max_logit": max(logits),
        "seconds": round(seconds, 1),
    }


def train_te(job: tuple[str, int, float]) -> dict[str, Any]:
    import _recall_te as te

    return te.train(*job, draw, (SYMBOLS, KEYS))


def on_transformer_engine(args: argparse.Namespace) -> None:
    """The arms of _recall_te.py; the runs share the GPU."""
    import _recall_te as te

    arms = args.arms or list(te.ARMS)
    unknown = sorted(set(arms) - set(te.ARMS))
    if unknown:
        raise SystemExit(f"--arms {unknown[0]} is not known with --stack te; use {', '.join(te.ARMS)}")
    jobs = [(a, s, v) for a in arms for v in args.v_off for s in range(args.seeds)]
    bar, runs = Progress(len(jobs), "runs"), []
    with multiprocessing.get_context("spawn").Pool(args.workers or 8, initializer=te.start) as pool:
        for r in pool.imap_unordered(train_te, jobs):
            runs.append(r)
            bar.step(f"{r['arm']} seed {r['seed']}: {r['tail']:.4f}")
    runs.sort(key=lambda r: (r["v_off"], arms.index(r["arm"]), r["seed"]))
    for v in args.v_off:
        rows = []
        for a in arms:
            mine = [r for r in runs if r["arm"] == a and r["v_off"] == v]
            tails, late = [r["tail"] for r in mine], sum(r["failed"] and r["last"] <= FAILED for r in mine)
            text = f"{statistics.median(tails):.2g} [{min(tails):.2g}, {max(tails):.2g}]"
            span = f"{min(r['max_logit'] for r in mine):.0f}-{max(r['max_logit'] for r in mine):.0f}"
            failed = f"{sum(r['failed'] for r in mine)}/{len(mine)}"
            rows.append([te.ARMS[a].label, text, failed, late, span, mine[0]["backend"]])
        head = ["arm", "tail loss, median [min, max]", "failed", "of them learned at the end", "max logit", "backend"]
        table(head, rows, f"v_off {v:g}, head_dim {te.WIDTH}, {te.STEPS} steps, {args.seeds} seeds")
    print(
        f"\ntail loss: mean cross-entropy of the query rows over the last {te.TAIL} steps (chance 3.47); failed: above {FAILED}; learned at "
        f"the end: the last {te.LAST} steps are below it"
    )
    about = {**te.versions(), "steps": te.STEPS, "head_dim": te.WIDTH, "tokens": TOKENS, "batch": BATCH}
    save(
        args.json, "recall_te", {"task": about, "runs": runs}, backend="Transformer Engine and the sm90 kernel on a GPU"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stack", choices=("cpu", "te"), default="cpu", help="te: the real kernels on a Hopper GPU")
    p.add_argument("--arms", nargs="+", default=None)
    p.add_argument("--full", action="store_true", help="all arms")
    p.add_argument("--seeds", type=int, default=None, help="default 5; 8 with --stack te")
    p.add_argument(
        "--v-off", type=float, nargs="+", default=[16.0], help="std of V's offset; several make a dose table"
    )
    p.add_argument("--plain", action="store_true", help="the null: queries only, no '?' rows")
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--workers", type=int, default=None, help="processes; default 2, 8 with --stack te")
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    args.seeds = args.seeds or (8 if args.stack == "te" else 5)
    if args.stack == "te":
        return on_transformer_engine(args)
    arms = args.arms or list(ARMS if args.full else DEFAULT)
    unknown = sorted(set(arms) - set(ARMS))
    if unknown:
        p.error(f"--arms {unknown[0]} is not known; use {', '.join(ARMS)}")
    jobs = [Job(a, s, v, args.plain, args.steps) for v in args.v_off for a in arms for s in range(args.seeds)]
    bar, runs = Progress(len(jobs), "runs"), []
    with multiprocessing.get_context("spawn").Pool(args.workers or 2) as pool:
        for r in pool.imap(train, jobs):
            runs.append(r)
            bar.step(f"{r['arm']} seed {r['seed']}: {r['tail']:.4f}")
    for v in args.v_off:
        rows = []
        for a in arms:
            mine = [r for r in runs if r["arm"] == a and r["v_off"] == v]
            tails, logits = [r["tail"] for r in mine], [r["max_logit"] for r in mine]
            text = f"{statistics.median(tails):.4f} [{min(tails):.4f}, {max(tails):.4f}]"
            span = f"{min(logits):.0f}-{max(logits):.0f}"
            rows.append([ARMS[a].label, text, f"{sum(r['failed'] for r in mine)}/{len(mine)}", span])
        head = ["arm", "tail loss, median [min, max]", "failed", "max logit"]
        table(
            head, rows, f"v_off {v:g}{', queries only' if args.plain else ''}, {args.steps} steps, {args.seeds} seeds"
        )
    print(
        f"\ntail loss: mean cross-entropy of the query rows over the last {TAIL} steps (chance 3.47); failed: above {FAILED}"
    )
    save(args.json, "recall", {"task": {"v_off": args.v_off, "plain": args.plain, "steps": args.steps}, "runs": runs})


if __name__ == "__main__":
    main()
