"""Probes under torch.compile: a tap is Python, so a probed call leaves the graph; where it may not, it runs without its tap and says so."""

import logging
from typing import Any

import torch

log = logging.getLogger("dm_plugin")


@torch.compiler.disable
def outside(call: Any, *args: Any, **kwargs: Any) -> Any:
    """call(...), not traced."""
    return call(*args, **kwargs)


@torch.compiler.assume_constant_result  # runs for real while the graph is traced
def must_stay() -> bool:
    """Is this being compiled with fullgraph=True? Then a warning says that nothing is recorded."""
    from torch._dynamo import symbolic_convert

    tx: Any = getattr(symbolic_convert.tls, "current_tx", None)
    while getattr(tx, "parent", None) is not None:
        tx = tx.parent
    whole = bool(getattr(tx, "one_graph", False) or getattr(tx, "error_on_graph_break", False))
    if whole:
        log.warning(
            "attention compiled with fullgraph=True hands out no row statistics; compile without fullgraph to probe it (training goes on)"
        )
    return whole
