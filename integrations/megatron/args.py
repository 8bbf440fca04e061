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
        type=_layers,
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
        for flag, value, default in (
            ("--dm-attention-layers", args.dm_attention_layers, None),
            ("--dm-mode", args.dm_mode, "matched"),
        ):
            if value != default:
                raise ValueError(f"{flag} {value} was given without --use-dm-attention; add it or drop {flag}")
        return spec
    if getattr(args, "fp8_dot_product_attention", False) and args.dm_attention_layers is None:
        raise ValueError(
            "--fp8-dot-product-attention asks for stock FP8 attention and --use-dm-attention for ours in every layer; drop one, or share the "
            "layers with --dm-attention-layers"
        )
    from .spec import announce, with_dm_attention

    chosen, layers = parse_layers(args.dm_attention_layers), getattr(args, "num_layers", None)
    default, exceptions = parse_modes(args.dm_mode)
    for flag, text, numbers in (
        ("--dm-attention-layers", args.dm_attention_layers, chosen or frozenset()),
        *(("--dm-mode", args.dm_mode, numbers) for numbers, _ in exceptions),
    ):
        if layers is not None and numbers and max(numbers) >= layers:
            raise ValueError(
                f"{flag} {text} names layer {max(numbers)} and the model has layers 0 to {layers - 1}; drop it (layers count from 0 over "
                "the whole model)"
            )
    spec = with_dm_attention(spec, args.dm_attention_layers, default, quiet=True)
    for numbers, mode in exceptions:
        outside = sorted(numbers - chosen) if chosen is not None else []
        if outside:
            raise ValueError(
                f"--dm-mode {args.dm_mode} names layer {outside[0]}, which --dm-attention-layers {args.dm_attention_layers} leaves to the "
                "stock attention; name the same layers in both"
            )
        spec = with_dm_attention(spec, numbers, mode, quiet=True)
    announce(chosen, default, exceptions)
    return spec


def parse_modes(text: str) -> tuple[str, list[tuple[frozenset[int], str]]]:
    """("matched", [({0, 1, 2, 3}, "stale"), ...]) from "matched,0-3=stale". Raises ValueError naming the part that is wrong."""
    defaults: list[str] = []
    exceptions: list[tuple[frozenset[int], str]] = []
    for part in text.split(","):
        layers, equals, mode = part.rpartition("=")
        mode = mode.strip()
        if mode not in MODES:
            raise ValueError(f"--dm-mode {text}: {mode!r} is not a delta; use one of {', '.join(MODES)}")
        if not equals:
            defaults.append(mode)
            continue
        numbers = parse_layers(layers.strip()) if layers.strip() else None
        if numbers is None:
            raise ValueError(f"--dm-mode {text}: {part.strip()!r} names no layers; write it like 0-3={mode}")
        twice = sorted(numbers & frozenset().union(*(n for n, _ in exceptions)))
        if twice:
            raise ValueError(f"--dm-mode {text}: layer {twice[0]} is named twice; give each layer one mode")
        exceptions.append((numbers, mode))
    if len(defaults) > 1:
        raise ValueError(
            f"--dm-mode {text}: {defaults[0]} and {defaults[1]} are both for all layers; give one, and exceptions by layer"
        )
    return (defaults or ["matched"])[0], exceptions


def _modes(text: str) -> str:
    try:
        parse_modes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    return text


def _layers(text: str) -> str:
    try:
        if parse_layers(text) is None:
            raise ValueError(f"layers={text!r} names no layer; write it like 0-11,20, or leave the flag out for all")
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
