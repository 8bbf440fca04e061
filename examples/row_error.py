"""Where a wrong delta does its damage: the error of dS row by row, in buckets of the row's largest probability.

    python examples/row_error.py                     spread 8, six seeds, published table beside ours

Error of a row: |dS - dS_exact| / |dS_exact| (L2 over its keys), dS_exact in FP64 from the same FP8 operands, so that only the delta and
the cast of dS differ. 4 heads, T=512, D=64, causal, format `paper`. CPU simulation.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _table import Progress, save, table
from toy_rowsum import inputs

from dm_plugin import casts, delta, reference
from dm_plugin.formats import get_format
from dm_plugin.quantise import quantise

LABELS = ("< 0.5", "0.5-0.9", "0.9-0.99", "0.99-0.999", "> 0.999")
EDGES = torch.tensor([0.5, 0.9, 0.99, 0.999])
PUBLISHED = {
    "before": {
        "stale": (1.5e-2, 4.4e-2, 0.40, 4.3, 88),
        "consistent": (3.3e-3, 5.0e-3, 2.5e-2, 0.26, 4.7),
        "matched": (1.2e-6, 1.4e-6, 3.1e-6, 1.1e-5, 2.1e-4),
    },
    "after": {
        "stale": (0.030, 0.052, 0.40, 4.3, 89),
        "consistent": (0.024, 0.025, 0.038, 0.26, 4.7),
        "matched": (0.024, 0.023, 0.024, 0.024, 0.032),
    },
}


def row_errors(args: list[Tensor], mode: str, fmt: str = "paper") -> tuple[Tensor, Tensor, Tensor]:
    """(error before the cast, after it, largest probability) of every row."""
    q, k, v, do = args
    record = get_format(fmt)
    call = reference.Call(record, q.shape[-1] ** -0.5, 0, mode)
    saved = reference.forward(q, k, v, call).saved
    _, stats = reference.backward(saved, do, call, want_stats=True)
    if stats is None or stats.delta is None:
        raise RuntimeError("the reference returned no statistics")
    doc = quantise(do.float().permute(0, 2, 1, 3).reshape(-1, 1, *do.shape[1::2]), record.q_block)
    q_hat, k_hat, v_hat, do_hat = (c.codes.double() * c.scale.double() for c in (saved.q, saved.k, saved.v, doc))
    hidden = ~reference.visible_keys(q.shape[1], k.shape[1], 0, q.device)
    p = (q_hat @ k_hat.transpose(-1, -2) * call.softmax_scale).masked_fill(hidden, -math.inf).softmax(-1)
    dp = do_hat @ v_hat.transpose(-1, -2)
    exact = p * (dp - (p * dp).sum(-1, keepdim=True))
    # dS of the mode, FP32 as the gradient has it
    p32 = torch.exp2(
        reference._logits2(saved.q, saved.k, call).masked_fill(hidden, -math.inf) - saved.lse2.unsqueeze(-1)
    )
    used = stats.delta.reshape(-1, 1, q.shape[1], 1)
    ds = p32 * (reference.dot(doc.codes, saved.v.codes) * (doc.scale * saved.v.scale.transpose(-1, -2)) - used)
    ds = ds.masked_fill(hidden, 0.0)
    cast = casts.cast_tiles(ds, 64, 64, record.grid_ds)
    size = exact.norm(dim=-1)
    before, after = ((x.double() - exact).norm(dim=-1) / size for x in (ds, cast.codes * cast.scale))
    keep = size.flatten() > 0
    return before.flatten()[keep], after.flatten()[keep], p.amax(-1).flatten()[keep]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--spread", type=float, default=8.0)
    p.add_argument("--seeds", type=int, default=6)
    p.add_argument("--json", default=None, metavar="PATH")
    args = p.parse_args()
    torch.set_num_threads(1)
    bar = Progress(len(delta.MODES) * args.seeds, "row errors")
    body: dict[str, Any] = {}
    rows: dict[str, list[list[Any]]] = {"before": [], "after": []}
    for mode in ("stale", "consistent", "matched"):
        parts = []
        for seed in range(args.seeds):
            parts.append(row_errors(inputs(seed, args.spread), mode))
            bar.step()
        before, after, top = (torch.cat(x) for x in zip(*parts, strict=True))
        bucket = torch.bucketize(top, EDGES.double(), right=True)
        for when, errors in (("before", before), ("after", after)):
            ours = [float(errors[bucket == b].median()) for b in range(5)]
            body[f"{mode}, {when}"] = ours
            there = PUBLISHED[when][mode] if args.spread == 8 else (None,) * 5
            rows[when] += [[mode, "published", *there], ["", "ours", *ours]]
    counts = [int((bucket == b).sum()) for b in range(5)]
    for when in ("before", "after"):
        table(
            ["delta", "", *LABELS],
            rows[when],
            f"median error of dS rows by largest P, {when} the cast (spread {args.spread:g}, {args.seeds} seeds)",
        )
    print(f"\nrows in each bucket: {counts}")
    save(
        args.json,
        "row_error",
        {"spread": args.spread, "seeds": args.seeds, "labels": LABELS, "rows": counts, "medians": body},
    )


if __name__ == "__main__":
    main()
