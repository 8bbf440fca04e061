"""Field cases of dumps: A06 many ranks and restarts, A11 kills, full disks and cut files, A15 views."""

import json
import logging
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
import torch

from dm_plugin.dump import DumpWriter, TruncatedDump, find_dumps, read_file, write_step
from dm_plugin.recorder import to_numpy

ARRAYS = {"a/row_sum_pre.num": np.arange(4.0), "a/row_sum_pre.count": np.arange(4)}


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


def test_A11_a_read_only_folder_is_one_warning_until_it_can_be_written_again() -> None:
    code = (
        "import logging, numpy as np, os, sys\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from dm_plugin.dump import DumpWriter, find_dumps, read_file\n"
        "out = sys.argv[1]\n"
        "if os.geteuid() == 0:  # root may write everywhere\n"
        "    os.chown(out, 65534, 65534); os.setgid(65534); os.setuid(65534)\n"
        "os.chmod(out, 0o500)\n"
        "w = DumpWriter(out + '/dumps')\n"
        "for step in range(3): w.submit(step, {'s/p.num': np.zeros(3)}, {})\n"
        "w.flush(); os.chmod(out, 0o700); w.submit(3, {'s/p.num': np.zeros(3)}, {}); w.close()\n"
        "print([(f.step, read_file(f.path)[0]['dm_plugin.lost']) for f in find_dumps(out + '/dumps')])"
    )
    with tempfile.TemporaryDirectory() as out:
        run = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True, check=True)
    assert run.stderr.count("training goes on") == 1
    assert run.stdout.strip() == "[(3, '3')]"


@pytest.mark.parametrize("cut", [1, 100, 10**9])
def test_A11_a_file_cut_short_is_reported_truncated_never_zeros(tmp_path, cut) -> None:
    path = write_step(tmp_path, 0, 0, ARRAYS, {})
    raw = path.read_bytes()
    path.write_bytes(raw[: max(len(raw) - cut, 0)])
    with pytest.raises(TruncatedDump, match=f"{path.name} is truncated"):
        read_file(path)
