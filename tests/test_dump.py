"""Dumps: whole or absent, never replaced, named errors; and the field cases A06, A11, A15."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dm_plugin.dump import (
    DumpError,
    DumpWriter,
    ForeignDump,
    NewerSchema,
    TruncatedDump,
    find_dumps,
    read_file,
    rule,
    write_step,
)
from dm_plugin.recorder import to_numpy

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


def test_A15_views_ties_expanded_empty_and_scalar_tensors_are_all_saved_right(tmp_path) -> None:
    qkv = torch.randn(5, 6, 4)
    q, k, v = qkv.split([2, 2, 2], dim=1)
    gain = torch.nn.Parameter(torch.randn(4))
    tensors = {
        "q": q, "k": k, "v": v.transpose(0, 2), "tied_a": gain, "tied_b": gain, "wide": torch.ones(1).expand(3, 2),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "bf16": torch.randn(3).bfloat16(), "int": torch.arange(3),
    }  # fmt: skip
    _, got = read_file(write_step(tmp_path, 0, 0, {f"s/{n}.x": to_numpy(t) for n, t in tensors.items()}, {}))
    for name, t in tensors.items():
        want = t.detach().float() if t.dtype == torch.bfloat16 else t.detach()
        assert got[f"s/{name}.x"].shape == tuple(t.shape)
        np.testing.assert_array_equal(got[f"s/{name}.x"], want.numpy())
    strided = np.arange(12.0).reshape(3, 4)[:, ::2]
    _, got = read_file(write_step(tmp_path, 1, 0, {"s/x.x": strided}, {}))
    np.testing.assert_array_equal(got["s/x.x"], strided)


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


def test_A06_ranks_of_one_job_write_distinct_files_and_a_restart_keeps_them(tmp_path) -> None:
    for attempt in range(2):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", f"import numpy as np; from dm_plugin.dump import write_step as w; w({str(tmp_path)!r}, 1, {r}, "
                 f"{{'s/x.num': np.full(1000, {r} + 10 * {attempt})}}, {{'dm_plugin.world': '{{\"tp_rank\": {r % 2}, \"pp_rank\": {r // 2}}}'}})"]
            )
            for r in range(4)
        ]  # fmt: skip
        assert [p.wait() for p in ranks] == [0] * 4
        for r, file in enumerate(find_dumps(tmp_path)):
            meta, arrays = read_file(file.path)
            assert (file.rank, arrays["s/x.num"][0]) == (r, r + 10 * attempt)
            assert json.loads(meta["dm_plugin.world"]) == {"tp_rank": r % 2, "pp_rank": r // 2}
    assert len(list(tmp_path.rglob("rank_*.safetensors"))) == 8


# ------------------------------------------------------------------------------------------------ A11
def test_A11_a_kill_in_the_middle_of_writing_leaves_only_whole_files(tmp_path) -> None:
    code = (
        "import numpy as np, sys; from dm_plugin.dump import write_step\n"
        "x = {f's{i}/p.num': np.random.rand(1 << 16) for i in range(8)}\n"
        "for step in range(10**6): write_step(sys.argv[1], step, 0, x, {}); print(step, flush=True)"
    )
    for i in range(3):
        out = tmp_path / str(i)
        job = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE)
        while int(job.stdout.readline()) < 3:
            pass
        time.sleep(0.003 * i)
        job.send_signal(signal.SIGKILL)
        job.wait()
        found = find_dumps(out)
        assert len(found) >= 4
        for file in found:
            assert len(read_file(file.path)[1]) == 8


def test_A11_a_full_disk_is_one_warning_and_the_lost_records_are_counted_in_the_next_dump(tmp_path) -> None:
    code = (
        "import logging, numpy as np, resource, signal, sys\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from dm_plugin.dump import DumpWriter, find_dumps, read_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "w = DumpWriter(sys.argv[1])\n"
        "small = {'s/p.num': np.zeros(10)}; big = {'s/p.num': np.zeros(1 << 19)}\n"
        "w.submit(0, small, {}); w.flush()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "w.submit(1, big, {}); w.submit(2, big, {}); w.flush()\n"
        "w.submit(3, small, {}); w.submit(4, small, {}); w.close()\n"
        "print([(f.step, read_file(f.path)[0]['dm_plugin.lost']) for f in find_dumps(sys.argv[1])], w.written, w.lost_total)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[(0, '0'), (3, '2'), (4, '0')] 3 2"
    assert run.stderr.count("training goes on") == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_A11_a_vanished_folder_is_made_again_and_an_impossible_one_is_one_warning(tmp_path, caplog) -> None:
    import shutil

    out = tmp_path / "dumps"
    writer = DumpWriter(out)
    writer.submit(0, ARRAYS, {})
    writer.flush()
    shutil.rmtree(out)
    writer.submit(1, ARRAYS, {})
    writer.flush()
    assert [f.step for f in find_dumps(out)] == [1]
    shutil.rmtree(out)
    out.write_text("a file where the folder was")
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        for step in (2, 3, 4):
            writer.submit(step, ARRAYS, {})
            writer.flush()
    assert caplog.text.count("training goes on") == 1
    out.unlink()
    writer.submit(5, ARRAYS, {})
    writer.close()
    assert read_file(find_dumps(out)[0].path)[0]["dm_plugin.lost"] == "3"


@pytest.mark.skipif(
    os.geteuid() == 0 and not os.environ.get("CI_NONROOT"), reason="root may write into a read-only folder"
)
def test_A11_a_read_only_folder_is_one_warning(tmp_path, caplog) -> None:
    tmp_path.chmod(0o500)
    writer = DumpWriter(tmp_path / "dumps")
    with caplog.at_level(logging.WARNING, logger="dm_plugin"):
        for step in range(3):
            writer.submit(step, ARRAYS, {})
        writer.close()
    tmp_path.chmod(0o700)
    assert caplog.text.count("training goes on") == 1


@pytest.mark.parametrize("cut", [1, 100, 10**9])
def test_A11_a_file_cut_short_is_reported_truncated_never_zeros(tmp_path, cut) -> None:
    path = write_step(tmp_path, 0, 0, ARRAYS, {})
    raw = path.read_bytes()
    path.write_bytes(raw[: max(len(raw) - cut, 0)])
    with pytest.raises(TruncatedDump, match=f"{path.name} is truncated"):
        read_file(path)


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


def test_fields_combine_by_their_name() -> None:
    assert [rule(n) for n in ("row_sum_pre.num", "max_logit.max", "codes.q.amax", "gain_share.q", "codes.q.count")] == [
        "add", "max", "max", "last", "add",
    ]  # fmt: skip
