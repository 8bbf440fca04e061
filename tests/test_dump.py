"""Dumps: whole or absent, never replaced, named errors. Field cases of dumps: field/test_dump_cases.py."""

import logging
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dm_plugin.dump import (
    DumpError,
    DumpWriter,
    ForeignDump,
    NewerSchema,
    find_dumps,
    read_file,
    rule,
    write_step,
)

ARRAYS = {"a/row_sum_pre.num": np.arange(4.0), "a/row_sum_pre.count": np.arange(4)}
DTYPES = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text("abc./_", min_size=1, max_size=9),
        hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)),
        max_size=4,
    )
)
def test_any_arrays_come_back_as_they_went(tmp_path_factory, arrays) -> None:
    path = write_step(tmp_path_factory.mktemp("d"), 7, 3, arrays, {"dm_plugin.backend": "é∑"})
    assert path.parts[-2:] == ("iter_0000007", "rank_00003.safetensors")
    meta, got = read_file(path)
    assert meta["dm_plugin.backend"] == "é∑"
    assert (meta["format"], meta["dm_plugin.schema"], meta["dm_plugin.step"], meta["dm_plugin.rank"]) == (
        "pt",
        "1",
        "7",
        "3",
    )
    assert got.keys() == arrays.keys()
    for key, x in arrays.items():
        assert got[key].dtype == x.dtype
        assert got[key].shape == x.shape
        np.testing.assert_array_equal(got[key], x)


def test_a_restart_adds_and_never_replaces_and_readers_take_the_newest(tmp_path) -> None:
    first = write_step(tmp_path, 5, 0, ARRAYS, {"run": "first"})
    before = first.read_bytes()
    write_step(tmp_path, 5, 0, ARRAYS, {"run": "second"})
    write_step(tmp_path, 5, 1, ARRAYS, {"run": "other rank"})
    assert first.read_bytes() == before
    found = find_dumps(tmp_path)
    assert [(f.step, f.rank, f.path.name) for f in found] == [
        (5, 0, "rank_00000.1.safetensors"),
        (5, 1, "rank_00001.safetensors"),
    ]
    assert read_file(found[0].path)[0]["run"] == "second"


def test_foreign_and_newer_files_are_named_and_nothing_is_partly_read(tmp_path) -> None:
    from safetensors.numpy import save_file

    cases = {
        "text.safetensors": b"not a dump at all, but long enough to look",
        "empty_header.safetensors": (4).to_bytes(8, "little") + b"null",
        "huge.safetensors": (1 << 60).to_bytes(8, "little"),
    }
    for name, raw in cases.items():
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(ForeignDump, match=name):
            read_file(tmp_path / name)
    save_file({"x": np.zeros(2)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(ForeignDump, match=r"has no dm_plugin\.schema"):
        read_file(tmp_path / "other.safetensors")
    save_file({"x": np.zeros(2)}, tmp_path / "new.safetensors", metadata={"dm_plugin.schema": "2"})
    with pytest.raises(NewerSchema, match="has schema 2, this version reads 1; update dm_plugin"):
        read_file(tmp_path / "new.safetensors")
    with pytest.raises(DumpError, match="cannot be read"):
        read_file(tmp_path / "absent.safetensors")


def test_every_damaged_byte_of_a_header_is_an_error_or_harmless(tmp_path) -> None:
    path = write_step(tmp_path, 0, 0, ARRAYS, {"note": "x"})
    raw = path.read_bytes()
    rng = np.random.default_rng(0)
    length = int.from_bytes(raw[:8], "little")
    for place in rng.integers(0, 8 + length, 150):
        damaged = bytearray(raw)
        damaged[place] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            _, arrays = read_file(path)
        except DumpError:
            continue
        assert all(x.size <= 4 for x in arrays.values())


# ------------------------------------------------------------------------------------------------ the writer thread
def test_submit_never_blocks_and_a_full_queue_is_counted(tmp_path, caplog, monkeypatch) -> None:
    gate = threading.Event()
    from dm_plugin import dump

    real = dump.write_step
    monkeypatch.setattr(dump, "write_step", lambda *a: (gate.wait(10), real(*a))[1])
    writer = DumpWriter(tmp_path, depth=2)
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        taken = [writer.submit(step, ARRAYS, {}) for step in range(8)]
    assert time.perf_counter() - start < 0.5
    assert taken.count(False) >= 5
    assert caplog.text.count("a probe record was dropped") == 1
    gate.set()
    writer.flush()
    writer.submit(9, ARRAYS, {})
    writer.close()
    lost = sum(int(read_file(f.path)[0]["dm_plugin.lost"]) for f in find_dumps(tmp_path))
    assert lost == writer.lost_total == taken.count(False)


def test_an_array_that_numpy_cannot_store_is_a_lost_record_not_an_exception(tmp_path, caplog) -> None:
    writer = DumpWriter(tmp_path)
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        writer.submit(0, {"s/x.num": np.array([object()])}, {})
        writer.close()
    assert "could not be built" in caplog.text
    assert writer.lost_total == 1
    assert find_dumps(tmp_path) == []


def test_a_folder_that_vanishes_after_the_file_has_its_name_costs_no_record(tmp_path, monkeypatch) -> None:
    """The record is whole where it was moved to: counting it as lost too would count it twice."""
    from dm_plugin import dump

    run, gone = tmp_path / "run", tmp_path / "gone"

    def vanish(_folder) -> None:
        run.rename(gone)
        run.write_text("not a folder")

    monkeypatch.setattr(dump, "_sync_folder", vanish)
    writer = DumpWriter(run)
    writer.submit(0, ARRAYS, {})
    writer.close()
    assert (writer.written, writer.lost_total) == (1, 0)
    (file,) = find_dumps(gone)
    assert read_file(file.path)[0]["dm_plugin.lost"] == "0"


def test_fields_combine_by_their_name() -> None:
    assert [rule(n) for n in ("row_sum_pre.num", "max_logit.max", "codes.q.amax", "gain_share.q", "codes.q.count")] == [
        "add", "max", "max", "last", "add",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_close_in_a_forked_child_does_not_wait_for_the_parents_thread(tmp_path) -> None:
    writer = DumpWriter(tmp_path)
    writer.submit(0, ARRAYS, {})
    writer.flush()
    child = os.fork()
    if child == 0:
        try:
            start = time.perf_counter()
            writer.close()
            quick = time.perf_counter() - start < 5
            writer.submit(1, ARRAYS, {})
            writer.close()
        finally:
            os._exit(0 if quick else 1)
    assert os.waitpid(child, 0)[1] == 0
    writer.submit(2, ARRAYS, {})
    writer.close()
    writer.close()
    assert [f.step for f in find_dumps(tmp_path)] == [0, 1, 2]
