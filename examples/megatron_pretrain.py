"""A Megatron pretraining script that knows nothing of dm_plugin: the shape of pretrain_gpt.py for megatron-core 0.19, on the bytes of a text.

    python -m dm_plugin.integrations.megatron.launch examples/megatron_pretrain.py --use-dm-attention --save runs/pretrain <Megatron's flags>
    python examples/megatron_pretrain.py <the same without the dm flags>          stock

A whole command line is in tests/sm90/test_sm90_launch.py. While it runs: dm-plugin probe start runs/pretrain/dm_probes --steps 5
"""

import sys
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Bytes(torch.utils.data.Dataset):
    """Consecutive windows of a byte string; window i of a given seed is always the same."""

    def __init__(self, tokens: int, samples: int, seed: int) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(p.read_bytes() for p in sorted(root.glob("*.py")))
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.tokens, self.samples, self.seed = tokens, samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start = int(torch.randint(0, len(self.data) - self.tokens - 1, (), generator=gen))
        window = self.data[start : start + self.tokens + 1]
        return {"tokens": window[:-1].contiguous(), "labels": window[1:].contiguous()}


def datasets(sizes: Any, vp_stage: int | None = None) -> tuple[Bytes, Bytes, Bytes]:
    args = get_args()
    train, valid, test = (Bytes(args.seq_length, max(1, size or 1), args.seed + i) for i, size in enumerate(sizes))
    return train, valid, test


datasets.is_distributed = True  # type: ignore[attr-defined]


def loss(labels: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = losses.float().sum(), torch.tensor(labels.numel(), dtype=torch.int, device=labels.device)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    batch = {key: x.cuda(non_blocking=True) for key, x in next(data).items()}
    positions = torch.arange(batch["tokens"].shape[1], device="cuda").expand_as(batch["tokens"])
    return model(batch["tokens"], positions, None, labels=batch["labels"]), partial(loss, batch["labels"])


if __name__ == "__main__":
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    sys.exit(pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step))
