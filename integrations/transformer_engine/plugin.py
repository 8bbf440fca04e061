"""How our attention gets into Transformer Engine: TE's own plugin hook (TE >= 2.20), or install() for every TE since 2.3.

Both put the same two things in place: the selector (`dot_product_attention.utils.get_attention_backend`) and the class that
te.DotProductAttention builds as its FlashAttention. TE turns an error in a plugin into a RuntimeWarning and goes on with its own attention,
so `assert_active()` and `status()` say what is really in place.
"""

import logging
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dm_plugin.delta import MODES
from dm_plugin.formats import Format, get_format
from dm_plugin.support import IMPLS

from ..logs import ensure_handler
from .selector import Settings, State, get_attention_backend
from .switches import OLDEST, installed, strict, switched_off, too_old

log = logging.getLogger("dm_plugin")
_DPA = "transformer_engine.pytorch.attention.dot_product_attention"


def load_plugins() -> None:
    """TE calls this for NVTE_PLUGIN, in the middle of its import: only leaves what TE will ask for on its extension module."""
    ensure_handler()
    _check_mode(State.settings.delta)
    tex = sys.modules["transformer_engine_torch"]

    def late(name: str) -> Any:  # PEP 562: the class can be built only when TE's backends module exists
        if name == "flash_attention":
            from .attention import attention_class

            return attention_class()
        raise AttributeError(f"module 'transformer_engine_torch' has no attribute {name!r}")

    tex.__getattr__ = late  # type: ignore[method-assign]
    tex.get_attention_backend = _select_for_plugin  # type: ignore[attr-defined]
    State.installed = "NVTE_PLUGIN"
    log.info("Transformer Engine asks dm_plugin for attention (NVTE_PLUGIN); mode %s", State.settings.delta)


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} (or DM_PLUGIN_MODE) is not a delta; use one of {', '.join(MODES)}")


def _modules() -> tuple[Any, Any]:
    """TE's modules that hold the selector and the class."""
    return import_module(f"{_DPA}.utils"), import_module(f"{_DPA}.dot_product_attention")


def _select_for_plugin(attention_params: Any) -> tuple[Any, ...]:
    if State.stock_selector is None:
        State.stock_selector = import_module(f"{_DPA}.utils")._original_get_attention_backend
    return get_attention_backend(attention_params)


def install(
    model: Any = None, *, mode: str | None = None, fmt: str | Format | None = None, impl: str | None = None
) -> dict[str, Any]:
    """Put our attention into Transformer Engine (2.3 or later), for models built from now on and for `model`; returns status().

    Safe to call again (to change the settings, or to adopt one more model). Raises ImportError for an older TE, ValueError for settings
    that do not exist.
    """
    _check_version()
    ensure_handler()
    _check_mode(mode or State.settings.delta)
    configure(mode=mode, fmt=fmt, impl=impl)
    import transformer_engine.pytorch  # noqa: F401

    utils, dpa = _modules()
    from .attention import adopt, attention_class

    if utils.get_attention_backend not in (get_attention_backend, _select_for_plugin):
        State.stock_selector, State.stock_class = utils.get_attention_backend, dpa.FlashAttention
        utils.get_attention_backend = get_attention_backend
        dpa.FlashAttention = attention_class()
        State.installed = "install()"
        log.info("Transformer Engine asks dm_plugin for attention (install()); mode %s", State.settings.delta)
    if model is not None and not adopt(model) and not _has_ours(model):
        raise ValueError("the model has no te.DotProductAttention; install(model) adopts those that were built before")
    refresh()
    return status()


def uninstall() -> None:
    """Give Transformer Engine its own selector and class back; models that were built meanwhile run TE's own choice from now on."""
    if State.installed is None:
        return
    utils, dpa = _modules()
    stock = State.stock_selector or getattr(utils, "_original_get_attention_backend", None)
    if stock is not None:
        utils.get_attention_backend = stock
    dpa.FlashAttention = State.stock_class or import_module(f"{_DPA}.backends").FlashAttention
    State.installed = State.stock_selector = State.stock_class = None
    State.settings = Settings()
    State.decisions.clear()
    refresh()


def configure(*, mode: str | None = None, fmt: str | Format | None = None, impl: str | None = None) -> None:
    """Change the delta, the operand format or the implementation; None leaves a setting as it is. Raises ValueError for unknown names."""
    if mode is not None:
        _check_mode(mode)
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl={impl!r} is not known; use one of {', '.join(IMPLS)}")
    if fmt is not None:
        get_format(fmt)
    given = {"mode": mode, "fmt": fmt, "impl": impl}
    State.settings = replace(State.settings, **{k: x for k, x in given.items() if x is not None})  # type: ignore[arg-type]
    if State.installed is not None and f"{_DPA}.dot_product_attention" in sys.modules:
        refresh()


def refresh() -> None:
    """Make TE select again at the next call. Needed after a change of NVTE_* or DM_PLUGIN_* variables: TE keeps its last selection."""
    dpa = import_module(f"{_DPA}.dot_product_attention")
    dpa._attention_backends["backend_selection_requires_update"] = True


def status() -> dict[str, Any]:
    """What is in place: installed (None, "NVTE_PLUGIN" or "install()"), active, mode, strict, switched_off, decisions so far."""
    return {
        "installed": State.installed,
        "active": _active(),
        "mode": State.settings.delta,
        "fmt": get_format(State.settings.fmt).name,
        "impl": State.settings.impl,
        "strict": strict(),
        "switched_off": switched_off(),
        "decisions": [{"for": what, "ours": d.ours, "reason": d.reason} for what, d in State.decisions],
    }


def assert_active() -> None:
    """Raise RuntimeError unless Transformer Engine asks our selector and builds our class."""
    if not _active():
        raise RuntimeError(
            "dm_plugin is not in Transformer Engine (TE reports a failed plugin only as a RuntimeWarning); set NVTE_PLUGIN="
            "dm_plugin.integrations.transformer_engine before the first import of transformer_engine, or call install()"
        )


def feature_dir() -> str:
    """The folder of dm_plugin's nvdlfw-inspect features, for debug_api.initialize(feature_dirs=[..., feature_dir()])."""
    return str(Path(__file__).with_name("inspect_features"))


def _active() -> bool:
    utils, dpa = (sys.modules.get(f"{_DPA}.{name}") for name in ("utils", "dot_product_attention"))
    if utils is None or dpa is None:
        return False
    ours = utils.get_attention_backend in (get_attention_backend, _select_for_plugin)
    return ours and dpa.FlashAttention.__name__ == "DMFlashAttention"


def _has_ours(model: Any) -> bool:
    return any(type(m).__name__ == "DMFlashAttention" for m in model.modules())


def _check_version() -> None:
    version = installed()
    if version is None:
        raise ImportError("Transformer Engine is not installed; pip install 'dm-plugin[te]'")
    if version[1] < OLDEST:
        raise ImportError(too_old(version[0]))
