"""Builds csrc/ into one shared library for sm_90a, and holds every kernel to its register plan.

    python csrc/build.py [--out dm_plugin/_C.so] [--only NAME] [--jobs N] [--json FILE]

Needs nvcc 13 and torch >= 2.11's headers (torch is not imported); no GPU. The library speaks torch's stable ABI and holds no Python
symbol, so one file serves every Python and every torch >= 2.11. Objects are cached under build/kernels by the hash of their text, the
headers they include, the flags and the compiler. The build fails when ptxas spills in a release kernel (a file whose stem ends in
_probe may spill, and is reported) or serialises wgmma (C7510, C7512). Exit codes: 0 built, 1 failed, 3 something is missing.
"""

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ARCH = "-gencode=arch=compute_90a,code=sm_90a"
PTXAS = "-v,--warn-on-spills,--warn-on-local-memory-usage"
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    ARCH,
    "-Xptxas",
    PTXAS,
    "--expt-relaxed-constexpr",
    "-DNDEBUG",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
]
CXX_FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-DNDEBUG",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",
    "-DUSE_CUDA",
]
SERIALISED = re.compile(r"C75(10|12)\b|wgmma.*serializ", re.IGNORECASE)
TORCH_MIN, NVCC_MIN = (2, 11), (13, 0)


class Missing(RuntimeError):
    """A tool or header that the build needs is not here; the message says which."""


class BuildFailed(RuntimeError):
    """The compiler refused a file, or a kernel broke its register plan."""


@dataclass
class Kernel:
    """What ptxas said about one entry function."""

    name: str
    file: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    barriers: int = 0


@dataclass
class Unit:
    """One compiled file. seconds: compile time, 0 when the object came from the cache."""

    source: Path
    obj: Path
    seconds: float = 0.0
    cached: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Tools:
    """Where the compiler and torch are."""

    nvcc: str
    nvcc_version: str
    cuda_include: Path
    cudart: Path
    torch: Path
    torch_version: str


def find_tools() -> Tools:
    """Locate nvcc >= 13 and torch >= 2.11. Raises Missing with one sentence."""
    nvcc = find_nvcc()
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    if not found or (int(found[1]), int(found[2])) < NVCC_MIN:
        raise Missing(
            f"{nvcc} is release {found[1] + '.' + found[2] if found else 'unknown'}; the kernels need a CUDA 13 toolkit"
        )
    torch = find_torch()
    version = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    number = version[1] if version else "0.0"
    if tuple(int(x) for x in re.findall(r"\d+", number)[:2]) < TORCH_MIN:
        raise Missing(f"torch {number} at {torch} is too old; the stable ABI that the kernels use needs torch >= 2.11")
    home = cuda_home(nvcc)
    cudart = next((p for p in (home / "lib64/libcudart_static.a", home / "lib/libcudart_static.a") if p.exists()), None)
    include = next(
        (p for p in (home / "include", home / "targets/x86_64-linux/include") if (p / "cuda_runtime.h").exists()), None
    )
    if cudart is None or include is None:
        raise Missing(
            f"libcudart_static.a or cuda_runtime.h is missing under {home}; install the CUDA 13 toolkit's cudart development files"
        )
    return Tools(nvcc, found[3], include, cudart, torch, number)


def find_nvcc() -> str:
    """nvcc from CUDA_HOME, the PATH or /usr/local/cuda. Raises Missing."""
    homes = [Path(h) / "bin/nvcc" for h in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if h]
    for path in [*homes, shutil.which("nvcc"), Path("/usr/local/cuda/bin/nvcc")]:
        if path and Path(path).exists():
            return str(path)
    raise Missing(
        "nvcc was not found in CUDA_HOME, PATH or /usr/local/cuda; install a CUDA 13 toolkit and run `python csrc/build.py`"
    )


def cuda_home(nvcc: str) -> Path:
    """The toolkit folder, as nvcc itself reports it (nvcc may be a wrapper script)."""
    text = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.search(r"^#\$ TOP=(.+)$", text.stdout + text.stderr, re.MULTILINE)
    return Path(found[1].strip()).resolve() if found else Path(nvcc).resolve().parents[1]


def find_torch() -> Path:
    """torch's folder, looked for without importing it (an isolated pip build hides it from sys.path, not from the disk)."""
    spec = importlib.util.find_spec("torch")
    places = [Path(spec.origin).parent] if spec and spec.origin else []
    places += [Path(sysconfig.get_path(kind)) / "torch" for kind in ("purelib", "platlib")]
    for place in places:
        if (place / "include/torch/csrc/stable/library.h").exists():
            return place
    raise Missing(
        "torch's headers were not found beside this Python; install torch >= 2.11 first and run `python csrc/build.py`"
    )


def compile_all(tools: Tools, cache: Path, only: str | None, jobs: int) -> list[Unit]:
    """Compile every instantiation and the torch-facing files, `jobs` at a time, longest first."""
    sources = sorted(ROOT.glob("sm90/*/instantiations/*.cu")) + sorted(ROOT.glob("api/*.cpp"))
    if only:
        sources = [s for s in sources if only in str(s.relative_to(ROOT))]
    sources.sort(key=lambda s: ("gradient" not in str(s), "forward" not in str(s), s.name))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda s: compile_one(tools, s, cache), sources))


def compile_one(tools: Tools, source: Path, cache: Path) -> Unit:
    """One object, from the cache when nothing it depends on has changed. Raises BuildFailed with the compiler's words."""
    if source.suffix == ".cu":
        command = [tools.nvcc, *NVCC_FLAGS, f"-I{ROOT}"]
        identity = tools.nvcc_version
    else:
        torch_include = [f"-I{tools.torch / 'include'}"]
        names = [
            f"-ffile-prefix-map={tools.torch}=torch",
            f"-ffile-prefix-map={ROOT}=csrc",
        ]  # no host paths in messages
        command = [
            os.environ.get("CXX", "g++"),
            *CXX_FLAGS,
            *names,
            f"-I{ROOT}",
            *torch_include,
            f"-isystem{tools.cuda_include}",
            f'-DDM_BUILD_INFO="{c_text(tools)}"',
        ]
        identity = tools.nvcc_version + tools.torch_version
    key = hashlib.sha256("\0".join([identity, *command]).encode())
    for dep in sorted(dependencies(source)):
        key.update(dep.read_bytes())
    stem = f"{source.parent.parent.name if source.suffix == '.cu' else 'api'}-{source.stem}"
    obj = cache / f"{stem}-{key.hexdigest()[:16]}.o"
    log = obj.with_suffix(".log")
    seconds = 0.0
    cached = obj.exists() and log.exists()
    if not cached:
        for stale in cache.glob(f"{stem}-*"):
            if re.fullmatch(rf"{re.escape(stem)}-[0-9a-f]{{16}}\.(o|log)", stale.name):
                stale.unlink(missing_ok=True)
        start = time.monotonic()
        partial = obj.with_suffix(".part.o")
        done = subprocess.run(
            [*command, "-c", str(source), "-o", str(partial)], capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - start
        if done.returncode:
            raise BuildFailed(f"{source.relative_to(ROOT)} does not compile:\n{done.stdout}{done.stderr}")
        log.write_text(done.stdout + done.stderr)
        partial.replace(obj)
    kernels, problems = read_ptxas(log.read_text(), str(source.relative_to(ROOT)))
    return Unit(source, obj, round(seconds, 2), cached, kernels, problems)


def dependencies(source: Path, seen: set[Path] | None = None) -> set[Path]:
    """The file and every file of csrc/ that it includes, by quoted includes."""
    seen = set() if seen is None else seen
    if source in seen:
        return seen
    seen.add(source)
    for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', source.read_text(), re.MULTILINE):
        for base in (source.parent, ROOT):
            if (base / name).exists():
                dependencies((base / name).resolve(), seen)
                break
    return seen


def read_ptxas(text: str, file: str) -> tuple[list[Kernel], list[str]]:
    """Kernels and broken rules in a compile log."""
    kernels: list[Kernel] = []
    by_name: dict[str, Kernel] = {}
    current: Kernel | None = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            current = by_name[found[1]] = Kernel(demangle(found[1]), file)
            kernels.append(current)
        elif found := re.search(r"Function properties for (\S+)", line):
            current = by_name.get(found[1], current)
        elif current and (
            found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line)
        ):
            current.stack, current.spill_stores, current.spill_loads = (int(found[i]) for i in (1, 2, 3))
        elif current and (found := re.search(r"Used (\d+) registers(?:, used (\d+) barriers)?", line)):
            current.registers, current.barriers = int(found[1]), int(found[2] or 0)
    problems = [line.strip() for line in text.splitlines() if SERIALISED.search(line)]
    if not Path(file).stem.endswith("_probe"):
        problems += [
            f"{k.name} spills {k.spill_stores} B stores, {k.spill_loads} B loads"
            for k in kernels
            if k.spill_stores or k.spill_loads
        ]
    return kernels, problems


def demangle(name: str) -> str:
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool:
        return name
    return subprocess.run([tool, name], capture_output=True, text=True, check=False).stdout.strip() or name


def source_hash() -> str:
    """One hash of every source under csrc/: part of the numerical identity of a run."""
    digest = hashlib.sha256()
    for path in sorted(p for p in ROOT.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cpp")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build_info(tools: Tools) -> dict[str, str]:
    """What the library says of itself. Host paths are left out."""
    return {
        "nvcc": tools.nvcc_version,
        "nvcc_flags": " ".join(NVCC_FLAGS),
        "torch_headers": tools.torch_version,
        "torch_target": "2.11",
        "cudart": "static",
        "source": source_hash(),
    }


def c_text(tools: Tools) -> str:
    """build_info as the inside of a C string literal."""
    return json.dumps(build_info(tools)).replace("\\", "\\\\").replace('"', '\\"')


def link(tools: Tools, units: list[Unit], out: Path) -> None:
    """Join the objects. cudart is linked statically; libtorch_cpu is the only torch library named, libtorch_cuda is found at run time.

    Static cudart: streams, the current context and capture state all live in the driver, so a second copy of the runtime sees torch's
    own; a shared one would tie the file to a libcudart.so.13 that a CPU build of torch does not bring. libtorch_cuda is left out for
    the same reason: its one symbol (the current stream) is looked up in the library that torch has already loaded.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    command = [os.environ.get("CXX", "g++"), "-shared", "-o", str(partial), *[str(u.obj) for u in units]]
    command += [
        str(tools.cudart),
        f"-L{tools.torch / 'lib'}",
        "-Wl,--no-as-needed",
        "-ltorch_cpu",
        "-Wl,--as-needed",
        "-Wl,--allow-shlib-undefined",
    ]
    command += ["-Wl,--no-undefined", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-ldl", "-lrt", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise BuildFailed(f"linking {out.name} failed:\n{done.stdout}{done.stderr}")
    partial.replace(out)


def report(units: list[Unit], tools: Tools, seconds: float) -> dict[str, object]:
    return {
        **build_info(tools),
        "seconds": round(seconds, 1),
        "compiled": sum(not u.cached for u in units),
        "cached": sum(u.cached for u in units),
        "files": {str(u.source.relative_to(ROOT)): u.seconds for u in units},
        "kernels": [asdict(k) for u in units for k in u.kernels],
        "problems": [f"{u.source.relative_to(ROOT)}: {p}" for u in units for p in u.problems],
    }


def build(
    out: Path | None, cache: Path, only: str | None = None, jobs: int | None = None, keep_going: bool = False
) -> dict[str, object]:
    """Compile, check and (unless `only` is given or out is None) link. keep_going: link in spite of broken plans, which stay reported.

    Raises Missing or BuildFailed.
    """
    start = time.monotonic()
    tools = find_tools()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:  # two test workers may build at once: the second finds the first's objects
        fcntl.flock(lock, fcntl.LOCK_EX)
        units = compile_all(tools, cache, only, jobs or len(os.sched_getaffinity(0)))
        result = report(units, tools, time.monotonic() - start)
        if result["problems"] and not keep_going:
            raise BuildFailed("kernels broke the register plan:\n" + "\n".join(map(str, result["problems"])))  # type: ignore[call-overload]
        if out is not None and only is None:
            link(tools, units, out)
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT.parent / "dm_plugin/_C.so", help="where the library goes")
    parser.add_argument("--cache", type=Path, default=ROOT.parent / "build/kernels", help="where objects are kept")
    parser.add_argument("--only", help="compile just the files whose path holds this text; nothing is linked")
    parser.add_argument("--no-link", action="store_true", help="compile and check everything, link nothing")
    parser.add_argument(
        "--keep-going", action="store_true", help="link even if a kernel breaks its plan (while working on it); exits 1"
    )
    parser.add_argument("--jobs", type=int, help="compilers at a time (default: one a core)")
    parser.add_argument("--json", type=Path, help="write the report here too")
    args = parser.parse_args()
    try:
        result = build(None if args.no_link else args.out, args.cache, args.only, args.jobs, args.keep_going)
    except Missing as error:
        print(f"dm_plugin kernels not built: {error}", file=sys.stderr)
        return 3
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    text = as_lines(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")
    print(text)
    return 1 if result["problems"] else 0


def as_lines(result: dict[str, object]) -> str:
    """JSON with one kernel a line."""
    kernels: list[object] = result["kernels"]  # type: ignore[assignment]
    body = json.dumps({**result, "kernels": []}, indent=1)
    return body.replace('"kernels": []', '"kernels": [\n  ' + ",\n  ".join(map(json.dumps, kernels)) + "\n ]")


if __name__ == "__main__":
    sys.exit(main())
