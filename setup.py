"""Builds the copy library into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))

from kvmig.ground.errors import KernelUnavailable  # noqa: E402
from kvmig.kernels import build  # noqa: E402


class BuildKernels(build_ext):
    """Compiles csrc to a plain shared library, which belongs to no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        """kvmig.kernels._lib.libkvmig_copy -> kvmig/kernels/_lib/libkvmig_copy.so."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Compile; `ext` is optional, so without a compiler the install goes on."""
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        try:
            build.compile_library(output)
        except KernelUnavailable as error:
            raise CompileError(str(error)) from error

    def copy_extensions_to_source(self) -> None:
        """An editable install puts the library beside the sources, where git keeps no folder."""
        Path("kvmig/kernels/_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """One wheel serves every Python 3 on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "kvmig.kernels._lib.libkvmig_copy",
            sources=["csrc/copy_cpu.cpp"],
            depends=["csrc/kvmig_copy.h"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
