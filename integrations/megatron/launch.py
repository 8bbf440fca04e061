"""Run a Megatron training script unchanged, with dm_plugin's flags and probes in it.

    torchrun --nproc-per-node 8 -m dm_plugin.integrations.megatron.launch pretrain_gpt.py --use-dm-attention [--dm-mode ...] <its flags>

The script's own parser gets the flags of `add_dm_args`; GPTModel, HybridModel and MambaModel get specs edited by `spec_from_args`; a
ProbeSession begins and ends with each of Megatron's training steps. A job with --save can be asked for probes while it runs
(`dm-plugin probe start <save>/dm_probes`), whether or not a probe flag was given. Nothing is patched beyond this process.
"""

import atexit
import functools
import inspect
import runpy
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from .args import add_dm_args, probes_from_args, spec_from_args

_MODELS = (
    ("megatron.core.models.gpt.gpt_model", "GPTModel"),
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
    ("megatron.core.models.mamba.mamba_model", "MambaModel"),
)
_SPECS = ("transformer_layer_spec", "mtp_block_spec", "hybrid_stack_spec", "mamba_stack_spec")


class _Job:
    """What the patched functions share: the script's arguments and the probe session."""

    args: Any = None
    session: Any = None


def main(argv: list[str]) -> None:
    """argv: the script and its arguments. Exits in one sentence when there is no script."""
    if argv[:1] in (["-h"], ["--help"]):
        add_dm_args(
            ArgumentParser("python -m dm_plugin.integrations.megatron.launch SCRIPT", description=__doc__)
        ).print_help()
        return
    if not argv or not Path(argv[0]).is_file():
        what = f"{argv[0]} is not a file" if argv else "no script was named"
        sys.exit(f"dm_plugin launch: {what}; use python -m dm_plugin.integrations.megatron.launch SCRIPT [its flags]")
    patch()
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    runpy.run_path(argv[0], run_name="__main__")


def patch() -> None:
    """Put the flags, the specs and the probes into Megatron's training package. Raises ImportError without megatron.training."""
    arguments: Any = import_module("megatron.training.arguments")
    training: Any = import_module("megatron.training.training")
    parse = _with_flags(arguments.parse_args)
    loaded: list[Any] = [m for name, m in sys.modules.items() if name.startswith("megatron.training")]
    for module in loaded:
        if getattr(module, "parse_args", None) is arguments.parse_args and module is not arguments:
            module.parse_args = parse
    arguments.parse_args = parse
    training.setup_model_and_optimizer = _with_probes(training.setup_model_and_optimizer)
    training.train_step = _with_steps(training.train_step)
    patched = [name for module, name in _MODELS if _edit_specs(module, name)]
    if "GPTModel" not in patched:
        raise ImportError("megatron.core has no GPTModel; dm_plugin supports megatron-core 0.16 and later")


def _with_flags(parse: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(parse)
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def both(parser: Any) -> Any:
            return add_dm_args(parser if extra_args_provider is None else extra_args_provider(parser))

        _Job.args = parse(both, *args, **kwargs)
        return _Job.args

    return parse_args


def _edit_specs(module: str, name: str) -> bool:
    """Make a model class edit the specs that it is built from; False when this megatron-core has no such class."""
    try:
        model = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return False
    build = model.__init__
    if getattr(build, "edits_specs", False):
        return True
    signature = inspect.signature(build)

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        for key in _SPECS:
            if bound.arguments.get(key) is not None and _Job.args is not None:
                bound.arguments[key] = spec_from_args(_Job.args, bound.arguments[key])
        build(*bound.args, **bound.kwargs)

    init.edits_specs = True  # type: ignore[attr-defined]
    model.__init__ = init
    return True


def _with_probes(setup: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(setup)
    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        out = setup(*args, **kwargs)
        _Job.session = _session(out[0])
        return out

    return setup_model_and_optimizer


def _session(model: Any) -> Any:
    """Probes as the flags say; with --save and no flag, on request only; None where no folder is known."""
    variables = import_module("megatron.training.global_vars")
    writer = variables.get_tensorboard_writer() or variables.get_wandb_writer()
    session = probes_from_args(_Job.args, model, writer)
    if session is None and getattr(_Job.args, "save", None):
        from .probes import attach_probes

        session = attach_probes(model, None, Path(_Job.args.save) / "dm_probes", on_signal=signal.SIGUSR1)
    if session is not None:
        atexit.register(session.close)
    return session


def _with_steps(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        session = _Job.session
        if session is None:
            return step(*args, **kwargs)
        number = kwargs.get("iteration")
        number = int(_Job.args.curr_iteration if number is None else number)
        session.begin(number)
        out = step(*args, **kwargs)
        session.step(number)
        return out

    return train_step


if __name__ == "__main__":
    main(sys.argv[1:])
