"""The recall task of recall.py on a GPU, with the real Transformer Engine: its BF16 and FP8 attention, and ours through its plugin hook.

Width and head_dim 128 (the only one that Transformer Engine trains in FP8 on Hopper), 64 tokens, lr 1e-3, 1600 steps, BF16 operands, FP32
master weights. A step (data, forward, backward, AdamW) of our arms is replayed as one CUDA graph after a few eager steps.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dm_plugin.formats import SM90, Format

WIDTH, STEPS, TAIL, LR, EAGER, LAST = 128, 1600, 50, 1e-3, 8, 10


class Arm(NamedTuple):
    """ours: delta of our kernel, None: Transformer Engine's attention. centred: subtract V's mean outside. fmt: operand format of ours."""

    label: str
    ours: str | None
    fp8: bool = False
    centred: bool = False
    fmt: Format = SM90


ARMS = {
    "te_bf16": Arm("Transformer Engine BF16", None),
    "te_fp8": Arm("Transformer Engine FP8 (stock)", None, fp8=True),
    "te_fp8_centred": Arm("Transformer Engine FP8, V centred outside", None, fp8=True, centred=True),
    "dm_stale": Arm("our kernel, stale", "stale"),
    "dm_consistent": Arm("our kernel, consistent", "consistent"),
    "dm_matched": Arm("our kernel, matched", "matched"),
    "dm_stale_raw": Arm("our kernel, V not centred, stale", "stale", fmt=SM90.with_(center_v=False)),
    "dm_matched_raw": Arm("our kernel, V not centred, matched", "matched", fmt=SM90.with_(center_v=False)),
}


class Data(NamedTuple):
    """All batches of a run on the GPU; first dimension: step."""

    anchor: Tensor
    keys: Tensor
    values: Tensor
    asked: Tensor
    labels: Tensor


class Recall(nn.Module):
    """recall.Recall at WIDTH with a te.DotProductAttention."""

    def __init__(self, v_off: float, seed: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        symbols, keys = sizes
        self.anchor, self.value = nn.Embedding(symbols, WIDTH), nn.Embedding(symbols, WIDTH)
        self.key, self.query = nn.Embedding(keys, WIDTH), nn.Embedding(keys + 1, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.read = nn.Linear(WIDTH, symbols)
        gen = torch.Generator().manual_seed(10_000 + seed)
        self.register_buffer("offset", v_off * torch.randn(WIDTH, generator=gen))
        self.attention = te.DotProductAttention(1, WIDTH, qkv_format="bshd", attn_mask_type="causal")

    def forward(self, d: Data, arm: Arm, top: Tensor | None = None) -> Tensor:
        pairs = self.key(d.keys) + self.value(d.values)
        x = torch.cat([self.anchor(d.anchor)[:, None], pairs, self.query(d.asked)], 1)
        q, k, v = self.qkv(x).unsqueeze(2).split(WIDTH, dim=-1)  # [B, T, 1, D]
        v = v + self.offset
        if top is not None:
            s = (q[:, :, 0] @ k[:, :, 0].transpose(1, 2) * WIDTH**-0.5).detach()
            top.copy_(torch.maximum(top, s.tril().amax()))
        mean = v.mean((0, 1), keepdim=True) if arm.centred else v.new_zeros(())
        q, k, shifted = (t.to(torch.bfloat16).contiguous() for t in (q, k, v - mean))
        with autocast(arm):
            o = self.attention(q, k, shifted).float().unflatten(2, (1, WIDTH))
        o = o + mean - self.offset
        return self.read(x + self.out(o[:, :, 0]))


@contextmanager
def autocast(arm: Arm) -> Iterator[None]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    if not arm.fp8:
        with nullcontext():
            yield
        return
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", fp8_dpa=True)
    with te.autocast(enabled=True, recipe=recipe):
        yield


def train(name: str, seed: int, v_off: float, draw: Callable[..., Any], sizes: tuple[int, int]) -> dict[str, Any]:
    """One run. draw: recall.draw; sizes: (symbols, keys)."""
    from dm_plugin.integrations.transformer_engine import backend_of, configure, refresh

    arm = ARMS[name]
    os.environ["NVTE_FLASH_ATTN"] = "0" if arm.ours is None else "1"
    if arm.ours is not None:
        configure(mode=arm.ours, fmt=arm.fmt)
    refresh()
    torch.manual_seed(seed)
    model = Recall(v_off, seed, sizes).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, capturable=True)
    gen = torch.Generator().manual_seed(1000 + seed)
    data = Data(*(torch.stack(x).cuda() for x in zip(*(draw(gen, False) for _ in range(STEPS)), strict=True)))
    losses, top, at = (
        torch.zeros(STEPS, device="cuda"),
        torch.zeros((), device="cuda"),
        torch.zeros(1, dtype=torch.long, device="cuda"),
    )
    first = data.labels.shape[2]

    def step() -> None:
        now = Data(*(x.index_select(0, at)[0] for x in data))
        scores = model(now, arm, top)[:, -first:]
        each = nn.functional.cross_entropy(scores.flatten(0, 1), now.labels.flatten(), reduction="none").view(
            now.labels.shape
        )
        optimizer.zero_grad(set_to_none=True)
        each.mean().backward()
        optimizer.step()
        real = (now.asked != sizes[1]).float()
        losses.index_copy_(0, at, ((each.detach() * real).sum() / real.sum())[None])
        at.add_(1)

    began = time.perf_counter()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(EAGER):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graphed = (
        arm.ours is not None
    )  # Transformer Engine's own attention runs step by step: replaying a capture of it crashed
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(EAGER, STEPS):
        graph.replay() if graphed else step()
    curve = losses.tolist()  # the only synchronisation
    tail = statistics.fmean(curve[-TAIL:])
    return {
        "arm": name,
        "seed": seed,
        "v_off": v_off,
        "tail": tail,
        "last": statistics.fmean(curve[-LAST:]),
        "failed": not tail <= 0.05,
        "max_logit": float(top),
        "backend": backend_of(),
        "graph": graphed,
        "seconds": round(time.perf_counter() - began, 1),
    }


def versions() -> dict[str, str]:
    import transformer_engine
    import transformer_engine_torch as tex

    return {
        "device": torch.cuda.get_device_name(),
        "transformer_engine": transformer_engine.__version__,
        "cudnn": str(tex.get_cudnn_version()),
    }


def start() -> None:
    """Bring our attention into Transformer Engine; every arm then says which one it wants."""
    import transformer_engine.pytorch  # noqa: F401
    from dm_plugin.integrations.transformer_engine import assert_active, install

    install()
    assert_active()
