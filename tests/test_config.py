"""Probe YAML and schedules: the shared grammar, and errors that name the key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dm_plugin.config import PROBES, ProbeConfig
from dm_plugin.schedule import Schedule

YAML = """
attention_probes:
  enabled: True
  layers: {layer_name_regex_pattern: '.*self_attention\\.core_attention'}
  transformer_engine: {LogTensorStats: {enabled: True}}
  dm_plugin:
    LogAttentionResiduals: {enabled: True, probes: [row_sum, key_col_sum], freq: 100, start_step: 100, end_step: 20000}
    DumpAttentionProbes: {enabled: True, freq: 5, start_end_list: [[0, 10], [6000, 6010]]}
other_tool:
  enabled: True
  layers: {layer_types: [qkv]}
  transformer_engine: {DisableFP8GEMM: {enabled: True}}
off:
  enabled: False
  dm_plugin: {}
"""
SITE = "decoder.layers.3.self_attention.core_attention"


def test_the_grammar_is_read_and_other_namespaces_are_left_alone(tmp_path) -> None:
    file = tmp_path / "probes.yaml"
    file.write_text(YAML)
    for config in (ProbeConfig.from_yaml(YAML), ProbeConfig.from_yaml(file), ProbeConfig.from_yaml(str(file))):
        assert [s.name for s in config.sections] == ["attention_probes"]
        section = config.section_for(SITE)
        assert section.wanted(100) == ({"row_sum", "key_col_sum"}, frozenset())
        assert section.wanted(5) == (frozenset(), set(PROBES))
        assert section.wanted(6005)[1] == set(PROBES)
        assert config.probes_for(SITE, 20001) == frozenset()
        assert config.section_for("decoder.layers.3.mlp") is None


BAD = {
    "a: [": "is not valid YAML",
    "[1]": "holds list; it must be a mapping",
    "a: 3": "section a holds 3",
    "a: {enabled: maybe, dm_plugin: {}}": "enabled='maybe' must be True or False",
    "a: {enabled: True, dm_plugin: {}}": "layers=None must be a mapping",
    "a: {enabled: True, layers: {layer_name_regex_pattern: '('}, dm_plugin: {}}": "is not a regular expression",
    "a: {enabled: True, layers: {layer_types: x}, dm_plugin: {}}": "layer_types='x' must be a list",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {LogStuff: {}}}": r"dm_plugin has \['LogStuff'\]; known features are",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, frequency: 3}}}": "unknown key 'frequency'",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, probes: [rowsum]}}}": r"probes=\['rowsum'\] must be a list from",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, probes: [[x]]}}}": r"probes=\[\['x'\]\] must be a list from",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {1: {}, LogStuff: {}}}": r"dm_plugin has \[1, 'LogStuff'\]",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, on: 1, off: 2, every: 3}}}": "unknown key",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, freq: 0}}}": "DumpAttentionProbes: freq=0 is not a schedule frequency",
    "a: {enabled: True, layers: {layer_types: [x]}, dm_plugin: {DumpAttentionProbes: {enabled: True, start_end_list: [[5, 1]]}}}": "start_end_list=",
}


@pytest.mark.parametrize("text", BAD)
def test_mistakes_are_named_by_section_and_key(text: str) -> None:
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        ProbeConfig.from_yaml(text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_site_in_two_sections_are_errors() -> None:
    with pytest.raises(FileNotFoundError):
        ProbeConfig.from_yaml("nowhere.yaml")
    two = ProbeConfig(ProbeConfig.default().sections * 2)
    with pytest.raises(ValueError, match="belongs to sections default and default"):
        two.section_for(SITE)


@given(
    st.builds(
        Schedule,
        freq=st.integers(1, 7),
        start_step=st.integers(0, 20),
        end_step=st.none() | st.integers(0, 40),
        start_end_list=st.none() | st.lists(st.integers(0, 30).map(lambda a: (a, a + 4)), min_size=1, max_size=3),
    ),
    st.integers(0, 45),
)
def test_next_step_is_the_first_enabled_one(schedule: Schedule, step: int) -> None:
    later = [s for s in range(step + 1, 100) if schedule.enabled(s)]
    assert schedule.next_step(step) == (later[0] if later else None)


def test_absolute_steps_count_and_ends_are_inclusive() -> None:
    s = Schedule(freq=10, start_step=5, end_step=30)
    assert [i for i in range(50) if s.enabled(i)] == [10, 20, 30]
    s = Schedule(freq=2, start_step=90, start_end_list=[(1, 4), (8, 8)])
    assert [i for i in range(120) if s.enabled(i)] == [2, 4, 8]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"freq": True}, "freq=True"),
        ({"start_step": None}, "start_step=None"),
        ({"end_step": "x"}, "end_step='x'"),
        ({"start_end_list": [3]}, "start_end_list"),
    ],
)
def test_bad_schedules_name_their_key(changes, text) -> None:
    with pytest.raises(ValueError, match=text):
        Schedule(**changes)
