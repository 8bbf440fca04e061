"""csrc/ compiles for sm_90a with the local nvcc, spills nothing, serialises no wgmma, and the library loads without a GPU."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("dm_plugin_build", ROOT / "csrc/build.py")
assert spec is not None
assert spec.loader is not None
build = importlib.util.module_from_spec(spec)
sys.modules["dm_plugin_build"] = build
spec.loader.exec_module(build)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The build report; objects come from build/kernels when nothing they depend on has changed."""
    try:
        build.find_tools()
    except build.Missing as missing:
        pytest.skip(str(missing))
    out = tmp_path_factory.mktemp("kernels") / "_C.so"
    result = build.build(out, ROOT / "build/kernels", keep_going=True)
    assert out.exists()
    return {**result, "out": out}


def test_every_kernel_keeps_its_register_plan(report):
    """No spill in a release kernel and no serialised wgmma: either would be a silent slow-down."""
    assert report["problems"] == []


def test_every_stage_is_compiled_for_every_head_dim(report):
    """A forgotten instantiation would only show on a GPU."""
    names = " ".join(k["name"] for k in report["kernels"])
    forward = {64: "forward_kernel", 128: "forward_kernel", 256: "forward256_kernel"}
    for d in (64, 128, 256):
        for stage in ("quantise_kernel", forward[d], "delta_kernel", "dq_kernel", "dkv_kernel"):
            assert f"{stage}<{d}" in names, f"{stage} is not compiled for head_dim {d}"


def test_main_kernels_use_the_fp8_tensor_core(report):
    """Their SASS holds QGMMA; a kernel without it would run on a slower path."""
    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    if not Path(tool).exists():
        pytest.skip("cuobjdump is not installed")
    forward = next((ROOT / "build/kernels").glob("forward-d128-*.o"))
    sass = subprocess.run([tool, "-sass", str(forward)], capture_output=True, text=True, check=True).stdout
    assert "QGMMA.64x" in sass
    assert "STL" not in sass


def test_library_needs_no_python_and_no_cuda_library(report):
    """Only libtorch_cpu is named; the rest comes with torch or the driver, so one file serves every Python and a CPU-only torch."""
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf is not installed")
    needed = subprocess.run([tool, "-d", str(report["out"])], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu" in needed
    for name in ("libpython", "libtorch_python", "libc10", "libtorch_cuda", "libcudart"):
        assert name not in needed, name


def test_library_loads_without_a_gpu_and_describes_itself(report):
    """On CPU tensors the operators refuse in words; build_info names the compiler; no host path is inside."""
    code = (
        "import ctypes, json, sys, torch\n"
        "torch.ops.load_library(sys.argv[1])\n"
        "f = ctypes.CDLL(sys.argv[1]).dm_plugin_build_info; f.restype = ctypes.c_char_p\n"
        "print(json.dumps([f().decode(), str(torch.ops.dm_plugin.attention_forward.default._schema)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(report["out"])], capture_output=True, text=True, check=True)
    info, schema = json.loads(done.stdout)
    assert json.loads(info)["nvcc"].startswith("13.")
    assert "Tensor q, Tensor k, Tensor v" in schema
    assert str(ROOT).encode() not in report["out"].read_bytes()


def test_fakes_match_the_schemas(report, monkeypatch):
    """Tracing needs shapes without a GPU: the fake of every operator returns as many tensors as its schema says."""
    torch = pytest.importorskip("torch")
    from dm_plugin import ops

    monkeypatch.setattr(ops, "LIBRARY", report["out"])
    if not ops.available()[0]:
        pytest.skip(ops.available()[1])
    with torch._subclasses.FakeTensorMode():
        q, k = torch.empty(2, 130, 4, 64, dtype=torch.bfloat16), torch.empty(2, 150, 2, 64, dtype=torch.bfloat16)
        out = ops.Forward(*torch.ops.dm_plugin.attention_forward(q, k, k, 0.1, True, 20, True, True, 2, True, True))
        back = ops.Backward(
            *torch.ops.dm_plugin.attention_backward(q, *out.for_backward(), 150, 0.1, True, 20, 2, True)
        )
    assert out.o.shape == q.shape
    assert out.q_t.shape == (2, 4, 2, 128 * 64)
    assert back.dk.shape == k.shape
    assert back.rows.shape == (6, 2, 4, 256)


def test_a_missing_toolkit_is_one_sentence(monkeypatch, tmp_path):
    """Without nvcc the build says so and exits with its own code: installs go on, CI prints the reason."""
    monkeypatch.setattr(build, "find_nvcc", lambda: (_ for _ in ()).throw(build.Missing("nvcc was not found")))
    monkeypatch.setattr(sys, "argv", ["build.py", "--out", str(tmp_path / "_C.so")])
    assert build.main() == 3
    assert not (tmp_path / "_C.so").exists()


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
            True,
        ),
        ("ptxas info    : (C7519) warpgroup.arrive is injected in around line 3", False),
    ],
)
def test_serialised_wgmma_fails_the_build(line, bad):
    assert bool(build.read_ptxas(line, "x.cu")[1]) is bad


def test_spills_fail_release_kernels_and_are_reported_for_probes():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "ptxas info    : Function properties for k\n"
        "    8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 240 registers, used 9 barriers\n"
    )
    kernels, problems = build.read_ptxas(log, "dkv128.cu")
    assert (kernels[0].registers, kernels[0].spill_stores, kernels[0].barriers) == (240, 8, 9)
    assert len(problems) == 1
    assert build.read_ptxas(log, "dkv128_probe.cu")[1] == []
