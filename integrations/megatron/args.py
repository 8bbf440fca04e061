"""Command-line flags for a Megatron training script: parse_args(extra_args_provider=add_dm_args)."""

from argparse import ArgumentParser

from dm_plugin.delta import MODES


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
    group.add_argument(
        "--fp8-dot-product-attention",
        action="store_true",
        help="Stock Transformer Engine FP8 attention (a config field for which Megatron has no flag).",
    )
    return parser
