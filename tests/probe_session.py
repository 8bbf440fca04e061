"""What the tests of probes share: a session over a model, its dumps, and the hooks that it made."""

from torch import nn

from dm_plugin.config import ProbeConfig
from dm_plugin.dump import find_dumps, read_file
from dm_plugin.session import ProbeSession


def session_for(model: nn.Module, out, freq: int = 1, **options) -> ProbeSession:
    return ProbeSession(ProbeConfig.default(freq=freq), out, **options).attach(model)


def dumps_of(out) -> list[tuple[dict, dict]]:
    return [read_file(f.path) for f in find_dumps(out)]


def hooks(model: nn.Module) -> int:
    count = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
    return count + sum(getattr(m, "tap", None) is not None for m in model.modules())
