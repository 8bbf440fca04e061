"""Build hook: where a CUDA 13 toolkit and torch's headers are found, `pip install .` compiles csrc/ into the package; elsewhere the
install goes on without the kernels and says what is missing. Everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def load_builder():
    spec = importlib.util.spec_from_file_location("dm_plugin_build", ROOT / "csrc/build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            print("dm_plugin: an editable install compiles no kernels; run `make kernels` or `python csrc/build.py`")
            return
        builder = load_builder()
        try:
            report = builder.build(Path(self.build_lib) / "dm_plugin/_C.so", ROOT / "build/kernels", keep_going=True)
        except builder.Missing as missing:
            print(f"dm_plugin: installing without the sm90 kernels: {missing}", file=sys.stderr)
            return
        print(
            f"dm_plugin: built {len(report['kernels'])} sm90 kernels in {report['seconds']} s",
            *report["problems"],
            sep="\n  ",
        )


class PlatformWheel(bdist_wheel):
    """The library holds no Python symbol: any Python 3, this platform. Without kernels the wheel is pure."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class MaybeBinary(Distribution):
    def has_ext_modules(self):
        builder = load_builder()
        try:
            builder.find_tools()
        except builder.Missing:
            return False
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=MaybeBinary)
