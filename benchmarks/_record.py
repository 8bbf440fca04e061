"""The record of a benchmark on a GPU with Transformer Engine: what is needed to run it again, beside its numbers."""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def save(path: str | None, what: str, body: dict[str, Any]) -> None:
    """Write a result file; nothing without a path."""
    if path is None:
        return
    import transformer_engine
    import transformer_engine_torch as tex

    record = {
        "what": what,
        "command": " ".join(["python3", *sys.argv]),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "torch": torch.__version__,
            "transformer_engine": transformer_engine.__version__,
            "cudnn": str(tex.get_cudnn_version()),
        },
        **body,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n")
