"""Probe configuration from YAML, in the grammar of nvdlfw-inspect so that one file serves both.

attention_probes:                                   # any section name
  enabled: True
  layers: {layer_name_regex_pattern: '.*core_attention'}    # or layer_types: [core_attention, ...]
  dm_plugin:                                        # our namespace; other namespaces are other tools' business
    LogAttentionResiduals: {enabled: True, probes: [row_sum, key_col_sum], freq: 100, start_step: 0, end_step: 20000}
    DumpAttentionProbes:   {enabled: True, freq: 1000, start_end_list: [[0, 10], [6000, 6010]]}
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .schedule import Schedule

PROBES = ("row_sum", "row_sum_signed", "key_col_sum", "gain_share", "delta_gap", "max_logit", "entropy", "codes")
ON_REQUEST = ("replay",)  # costs more than the others: only where it is named
FEATURES = ("LogAttentionResiduals", "DumpAttentionProbes")
_FEATURE_KEYS = ("enabled", "probes", "freq", "start_step", "end_step", "start_end_list")


@dataclass(frozen=True)
class Feature:
    """When a feature runs and which probes it wants."""

    schedule: Schedule
    probes: frozenset[str]


@dataclass(frozen=True)
class Section:
    """One group of layers: a site belongs to it if the pattern matches its whole name or a type is part of it."""

    name: str
    pattern: str | None
    types: tuple[str, ...]
    log: Feature | None
    dump: Feature | None

    def matches(self, site: str) -> bool:
        if self.pattern is not None and re.fullmatch(self.pattern, site):
            return True
        return any(kind in site for kind in self.types)

    def wanted(self, step: int) -> tuple[frozenset[str], frozenset[str]]:
        """(probes to log, probes to dump) at a step."""
        on = [
            f.probes if f is not None and f.schedule.enabled(step) else frozenset[str]() for f in (self.log, self.dump)
        ]
        return on[0], on[1]


@dataclass(frozen=True)
class ProbeConfig:
    """All enabled sections. An empty config probes nothing by itself; a request to a running job still can."""

    sections: tuple[Section, ...] = ()

    @staticmethod
    def default(freq: int = 100, probes: tuple[str, ...] = PROBES) -> "ProbeConfig":
        """Every attention site, all probes, dumped on every `freq`-th step."""
        feature = Feature(Schedule(freq=freq), frozenset(probes))
        return ProbeConfig((Section("default", ".*", (), None, feature),))

    @staticmethod
    def from_yaml(source: str | Path) -> "ProbeConfig":
        """Read a file (a Path, or a string that ends in .yaml/.yml) or YAML text.

        Raises ValueError naming the section and key, what came and what is allowed; FileNotFoundError for a missing file.
        """
        is_file = isinstance(source, Path) or str(source).rstrip().endswith((".yaml", ".yml"))
        text = Path(source).read_text() if is_file else str(source)
        where = str(source) if is_file else "probe config"
        try:
            tree = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(tree, dict):
            raise ValueError(f"{where} holds {type(tree).__name__}; it must be a mapping of section names to sections")
        sections = [_section(str(name), body, where) for name, body in tree.items()]
        return ProbeConfig(tuple(s for s in sections if s is not None))

    def section_for(self, site: str) -> Section | None:
        """The section a site belongs to. Raises ValueError when two claim it."""
        found = [s for s in self.sections if s.matches(site)]
        if len(found) > 1:
            raise ValueError(
                f"site {site} belongs to sections {found[0].name} and {found[1].name}; a layer may belong to one only"
            )
        return found[0] if found else None

    def probes_for(self, site: str, step: int) -> frozenset[str]:
        """Every probe wanted of a site at a step, to log or to dump."""
        section = self.section_for(site)
        return frozenset().union(*section.wanted(step)) if section is not None else frozenset()


def _section(name: str, body: Any, where: str) -> Section | None:
    label = f"{where}: section {name}"
    if not isinstance(body, dict):
        raise ValueError(f"{label} holds {body!r}; it must be a mapping with enabled, layers and dm_plugin")
    ours = body.get("dm_plugin")
    if not _flag(body, "enabled", label) or ours is None:
        return None
    layers = body.get("layers")
    if not isinstance(layers, dict) or not layers or not set(layers) <= {"layer_name_regex_pattern", "layer_types"}:
        raise ValueError(f"{label}: layers={layers!r} must be a mapping with layer_name_regex_pattern or layer_types")
    pattern = layers.get("layer_name_regex_pattern")
    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{label}: layer_name_regex_pattern={pattern!r} is not a regular expression ({error})"
        ) from error
    types = layers.get("layer_types") or []
    if not isinstance(types, list) or not all(isinstance(t, str) for t in types):
        raise ValueError(f"{label}: layer_types={types!r} must be a list of names")
    if not isinstance(ours, dict) or not set(ours) <= set(FEATURES):
        wrong = sorted(set(ours) - set(FEATURES), key=str) if isinstance(ours, dict) else ours
        raise ValueError(f"{label}: dm_plugin has {wrong!r}; known features are {', '.join(FEATURES)}")
    log, dump = (_feature(ours.get(f), f"{label}: {f}") for f in FEATURES)
    return Section(name, pattern, tuple(types), log, dump)


def _feature(body: Any, label: str) -> Feature | None:
    if body is None:
        return None
    if not isinstance(body, dict):
        raise ValueError(f"{label}={body!r} must be a mapping with {', '.join(_FEATURE_KEYS)}")
    unknown = sorted(set(body) - set(_FEATURE_KEYS), key=str)
    if unknown:
        raise ValueError(f"{label}: unknown key {unknown[0]!r}; known keys are {', '.join(_FEATURE_KEYS)}")
    if not _flag(body, "enabled", label):
        return None
    probes = body.get("probes", list(PROBES))
    if not are_probes(probes) or not probes:
        raise ValueError(f"{label}: probes={probes!r} must be a list from {', '.join(PROBES + ON_REQUEST)}")
    keys = {k: body[k] for k in ("freq", "start_step", "end_step", "start_end_list") if k in body}
    try:
        return Feature(Schedule(**keys), frozenset(probes))
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from error


def are_probes(value: Any) -> bool:
    """Is this a list of probe names?"""
    return isinstance(value, list) and all(isinstance(p, str) and p in PROBES + ON_REQUEST for p in value)


def _flag(body: dict[str, Any], key: str, label: str) -> bool:
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{label}: {key}={value!r} must be True or False")
    return value
