"""Command-line flags for a Megatron training script, and what they ask for.

args = parse_args(extra_args_provider=add_dm_args)
spec = spec_from_args(args, spec)                  # unchanged without --use-dm-attention
session = probes_from_args(args, model, writer)    # None without a probe flag

--dm-mode takes one delta for all layers, or one and exceptions by layer: matched,0-3=stale,17=consistent
"""

import signal
from argparse import ArgumentParser, ArgumentTypeError
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
    group.add_argument(
        "--dm-mode",
        type=_modes,
        default="matched",
        metavar="matched[,0-3=stale]",
        help=f"Delta that the softmax backward subtracts ({', '.join(MODES)}), with exceptions by global layer.",
    )
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
    default, exceptions = parse_modes(args.dm_mode)
    spec = with_dm_attention(spec, args.dm_attention_layers, default)
    for numbers, mode in exceptions:
        outside = sorted(numbers - chosen) if chosen is not None else []
        if outside:
            raise ValueError(
                f"--dm-mode {args.dm_mode} names layer {outside[0]}, which --dm-attention-layers {args.dm_attention_layers} leaves to the "
                "stock attention; name the same layers in both"
            )
        spec = with_dm_attention(spec, numbers, mode)
    return spec


def parse_modes(text: str) -> tuple[str, list[tuple[frozenset[int], str]]]:
    """("matched", [({0, 1, 2, 3}, "stale"), ...]) from "matched,0-3=stale". Raises ValueError naming the part that is wrong."""
    default, exceptions = "matched", []
    for part in text.split(","):
        layers, equals, mode = part.rpartition("=")
        if mode.strip() not in MODES:
            raise ValueError(f"--dm-mode {text}: {mode.strip()!r} is not a delta; use one of {', '.join(MODES)}")
        if equals:
            exceptions.append((parse_layers(layers.strip()) or frozenset(), mode.strip()))
        else:
            default = mode.strip()
    return default, exceptions


def _modes(text: str) -> str:
    try:
        parse_modes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


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
    writer = writer if args.log_dm_probes_to_tensorboard else None
    return attach_probes(model, config, out, writer=writer, on_signal=signal.SIGUSR1)
