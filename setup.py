"""Builds the kernel libraries into the package; everything else is in pyproject.toml.

The CPU's always; the GPU's where there is nvcc, or as KVMIG_CUDA=1 or 0 says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT))

from kvmig.core.errors import KernelUnavailable  # noqa: E402
from kvmig.kernels import build  # noqa: E402

FOLDER = "kvmig.kernels._lib"


class BuildKernels(build_ext):
    """Compiles csrc to plain shared libraries, which belong to no Python version."""

    def get_ext_filename(self, fullname: str) -> str:
        """kvmig.kernels._lib.libkvmig_cpu -> kvmig/kernels/_lib/libkvmig_cpu.so."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext: Extension) -> None:
        """Put the library there; an optional `ext` is left out where there is no compiler."""
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        recipe = next(one for one in RECIPES if ext.name == f"{FOLDER}.{one.name}")
        try:
            build.install_library(output, recipe)
        except KernelUnavailable as error:
            raise CompileError(str(error)) from error

    def copy_extensions_to_source(self) -> None:
        """An editable install puts the libraries beside the sources; git keeps no such folder."""
        Path("kvmig/kernels/_lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """One wheel serves every Python 3 on the platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """py3-none-<platform>."""
        return "py3", "none", super().get_tag()[2]


def extension(recipe: build.BuildRecipe, optional: bool) -> Extension:
    """One library, with paths from the root as setuptools wants them."""
    return Extension(
        f"{FOLDER}.{recipe.name}",
        sources=[f"csrc/{path.name}" for path in recipe.sources],
        depends=[f"csrc/{path.name}" for path in recipe.headers],
        optional=optional,
    )


RECIPES = [build.cpu(), *([build.cuda()] if build.wants_cuda() else [])]
FORCED = os.environ.get("KVMIG_CUDA") == "1"

setup(
    ext_modules=[
        extension(one, optional=one.name == "libkvmig_cpu" or not FORCED) for one in RECIPES
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
