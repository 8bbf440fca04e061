"""Command-line flags for a Megatron training script, and what they ask for.

args = parse_args(extra_args_provider=add_dm_args)
spec = spec_from_args(args, spec)                  # unchanged without --use-dm-attention
session = probes_from_args(args, model, writer)    # None without a probe flag
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dm_plugin.config import ProbeConfig
from dm_plugin.control import parse_layers
from dm_plugin.delta import MODES

if TYPE_CHECKING:
    from dm_plugin.session import ProbeSession


def add_dm_args(parser: ArgumentParser) -> ArgumentParser:
    """Add dm_plugin's flags and return the parser (the shape of Megatron's extra_args_provider)."""
    group = parser.add_argument_group("dm_plugin")
    group.add_argument(
        "--use-dm-attention", action="store_true", help="Use dm_plugin's FP8 attention in the layer spec."
    )
    group.add_argument("--dm-mode", choices=MODES, default="matched", help="Delta that the softmax backward subtracts.")
    group.add_argument(
        "--dm-attention-layers",
        default=None,
        metavar="0-11,20",
        help="Global layers (from 0) that use it; default: all.",
    )
    group.add_argument("--dm-probes-config", default=None, metavar="FILE", help="YAML that says which probes run when.")
    group.add_argument(
        "--save-dm-probes-interval",
        type=int,
        default=None,
        metavar="N",
        help="Dump all probes every N steps under <save>/dm_probes.",
    )
    group.add_argument(
        "--log-dm-probes-to-tensorboard",
        action="store_true",
        help="Write log10 residual medians to the trainer's writer.",
    )
    if "--fp8-dot-product-attention" not in parser._option_string_actions:  # a later Megatron may bring it
        group.add_argument(
            "--fp8-dot-product-attention",
            action="store_true",
            help="Stock Transformer Engine FP8 attention (a config field for which Megatron has no flag).",
        )
    return parser


def spec_from_args(args: Any, spec: Any) -> Any:
    """The layer spec with our attention where the flags ask for it. Raises ValueError for flags that contradict each other."""
    if not args.use_dm_attention:
        if args.dm_attention_layers is not None:
            raise ValueError(
                f"--dm-attention-layers {args.dm_attention_layers} was given without --use-dm-attention; add it or drop the layers"
            )
        return spec
    if getattr(args, "fp8_dot_product_attention", False) and args.dm_attention_layers is None:
        raise ValueError(
            "--fp8-dot-product-attention asks for stock FP8 attention and --use-dm-attention for ours in every layer; drop one, or share the "
            "layers with --dm-attention-layers"
        )
    from .spec import with_dm_attention

    chosen, layers = parse_layers(args.dm_attention_layers), getattr(args, "num_layers", None)
    if chosen is not None and layers is not None and max(chosen) >= layers:
        raise ValueError(
            f"--dm-attention-layers {args.dm_attention_layers} names layer {max(chosen)} and the model has layers 0 to {layers - 1}; "
            "drop it (layers count from 0 over the whole model)"
        )
    return with_dm_attention(spec, args.dm_attention_layers, args.dm_mode)


def probes_from_args(args: Any, model: Any, writer: Any = None, out: str | Path | None = None) -> "ProbeSession | None":
    """A session attached to `model` as the flags say, dumping under <save>/dm_probes (or `out`); None if no flag asks for probes.

    Raises ValueError when dumps are asked for and there is no folder, or both a config and an interval are given.
    """
    every, file = args.save_dm_probes_interval, args.dm_probes_config
    if every is None and file is None:
        if args.log_dm_probes_to_tensorboard:
            raise ValueError(
                "--log-dm-probes-to-tensorboard needs --dm-probes-config with a LogAttentionResiduals section"
            )
        return None
    if every is not None and file is not None:
        raise ValueError("--save-dm-probes-interval and --dm-probes-config both say when to probe; give one of them")
    if every is not None and every < 1:
        raise ValueError(f"--save-dm-probes-interval {every} must be 1 or more steps")
    if out is None and getattr(args, "save", None):
        out = Path(args.save) / "dm_probes"
    if out is None:
        raise ValueError("probes need a folder for their dumps; give --save")
    from .probes import attach_probes

    config = ProbeConfig.default(freq=every) if every is not None else file
    return attach_probes(model, config, out, writer=writer if args.log_dm_probes_to_tensorboard else None)
