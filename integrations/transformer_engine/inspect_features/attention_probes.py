"""nvdlfw-inspect features of dm_plugin: attention probes in the YAML and the step() that Transformer Engine's debug features use.

    import nvdlfw_inspect.api as debug_api
    from dm_plugin.integrations.transformer_engine import feature_dir

    debug_api.initialize("debug.yaml", feature_dirs=[te_features, feature_dir()])
    debug_api.dm_plugin.attach(model, "runs/x/dm_probes", writer=tensorboard_writer)
    for batch in data: ...; debug_api.step()

nvdlfw-inspect executes every file of a feature folder; this one registers the namespace `dm_plugin` and its two features. The probes
themselves are a ProbeSession, begun and ended by debug_api.step().
"""

from typing import Any

import nvdlfw_inspect.api as debug_api
from nvdlfw_inspect.base import BaseNamespaceAPI
from nvdlfw_inspect.registry import Registry


@Registry.register_feature(namespace="dm_plugin")
class LogAttentionResiduals:
    """Writes log10 medians of the row residuals to the trainer's writer.

    LogAttentionResiduals: {enabled: True, probes: [row_sum, ...], freq: 100, start_step: 0, end_step: 20000, start_end_list: [[0, 10]]}
    """


@Registry.register_feature(namespace="dm_plugin")
class DumpAttentionProbes:
    """Writes one dump a rank and probed step; keys as LogAttentionResiduals."""


@Registry.register_namespace_api(namespace="dm_plugin")
class DMPluginAPI(BaseNamespaceAPI):
    """debug_api.dm_plugin: attach() once the model is built; debug_api.step() and end_debug() do the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._session: Any = None
        self._step = 0

    def attach(self, model: Any, out: Any = None, **options: Any) -> Any:
        """A ProbeSession over `model` with the dm_plugin sections of the file that debug_api was initialised with; returns it.

        out: dump folder, None for scalars only. options: as integrations.megatron.attach_probes. Raises ValueError for a wrong section.
        """
        from dm_plugin.integrations.megatron import attach_probes

        from dm_plugin.config import ProbeConfig

        manager = debug_api.DEBUG_MANAGER
        self._step = manager._trainer_iteration_count
        self._session = attach_probes(model, ProbeConfig.from_yaml(manager.config_file), out, **options)
        self._session.begin(self._step)
        return self._session

    def step(self) -> None:
        if self._session is not None:
            self._session.step(self._step)
            self._step += 1
            self._session.begin(self._step)

    def end_debug(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    # no call of Transformer Engine is routed to these features
    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None: ...
    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None: ...

    def routing_condition(
        self, api_name: str, config: Any, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, None]:
        return False, None

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        return False
