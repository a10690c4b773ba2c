"""Compiles csrc to the kernel libraries: in setup.py, or once per user at first use."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmig.core.errors import KernelUnavailable
from kvmig.core.file_lock import lock_file

CSRC = Path(__file__).parent / "csrc"
SOURCES = tuple(sorted(CSRC.glob("*_cpu.cpp")))
HEADERS = tuple(sorted(CSRC.glob("*.h")))
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
CUDA_SOURCES = tuple(sorted(CSRC.glob("*.cu")))
CUDA_HEADERS = (CSRC / "kvmig.h", *sorted(CSRC.glob("*.cuh")))
CUDA_FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall,-Wextra")
CUDA_TARGETS = ("sm_80", "sm_90", "sm_100")
"""GPUs to compile for, and PTX of the last of them that nvcc knows, for those to come."""
TIMEOUT_S = 300.0
"""Longest wait for the compiler, and for another process that compiles."""


@dataclass(frozen=True)
class BuildRecipe:
    """How one library is made. `compiler` gives the command to which files are added.

    Raises KernelUnavailable there if it isn't installed.
    """

    name: str
    sources: tuple[Path, ...]
    headers: tuple[Path, ...]
    compiler: Callable[[], list[str]]
    link: tuple[str, ...] = ()

    def fingerprint(self, command: list[str]) -> str:
        """Differs when the library that sources and flags give would differ."""
        digest = hashlib.sha256(repr((command, self.link, platform.machine())).encode())
        for path in (*self.headers, *self.sources):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]


def cpu() -> BuildRecipe:
    """libkvmig_cpu."""
    return BuildRecipe("libkvmig_cpu", SOURCES, HEADERS, lambda: [*compiler(), *FLAGS])


def cuda() -> BuildRecipe:
    """libkvmig_cuda. CUDA's run-time library is part of it, so any driver new enough will do."""
    link = ("-cudart", "static", "-Xlinker", "--exclude-libs,ALL")
    return BuildRecipe("libkvmig_cuda", CUDA_SOURCES, CUDA_HEADERS, cuda_compiler, link)


def compiler() -> list[str]:
    """The C++ compiler as a command: $CXX, or the first of the usual names on the path."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise KernelUnavailable("no C++ compiler found (looked for $CXX, g++, c++, clang++)")


def nvcc() -> str:
    """$CUDA_HOME's nvcc, the one on the path, or that of the usual folder."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"))
    looked = [str(Path(home, "bin")) for home in homes if home]
    for folder in (*looked, None, "/usr/local/cuda/bin"):
        if found := shutil.which("nvcc", path=folder):
            return found
    raise KernelUnavailable("no nvcc found (looked in $CUDA_HOME, on the path, /usr/local/cuda)")


def cuda_compiler() -> list[str]:
    """nvcc with its flags, for those of CUDA_TARGETS that it knows."""
    path = nvcc()
    known = run([path, "--list-gpu-code"]).split()
    targets = [target for target in CUDA_TARGETS if target in known]
    if not targets:
        raise KernelUnavailable(f"{path} compiles for none of {', '.join(CUDA_TARGETS)}")
    architectures = [target.replace("sm_", "compute_") for target in targets]
    pairs = [*zip(architectures, targets, strict=True), (architectures[-1], architectures[-1])]
    options = [f"-gencode=arch={architecture},code={code}" for architecture, code in pairs]
    return [path, *CUDA_FLAGS, *options]


def wants_cuda() -> bool:
    """Whether an installation compiles the CUDA library: KVMIG_CUDA=1 or 0 decides.

    Else it does where there is nvcc: an image built without a GPU has it, too. Raises
    KernelUnavailable for another value, and for 1 without nvcc.
    """
    match os.environ.get("KVMIG_CUDA", ""):
        case "0":
            return False
        case "1":
            nvcc()
            return True
        case "":
            try:
                nvcc()
            except KernelUnavailable:
                return False
            return True
        case other:
            raise KernelUnavailable(f"KVMIG_CUDA={other} is neither 0 nor 1")


def compile_library(output: Path, recipe: BuildRecipe | None = None) -> None:
    """Build a library (cpu's) at `output`, where all of it appears at once.

    Raises KernelUnavailable with the compiler's own words.
    """
    recipe = recipe or cpu()
    command = recipe.compiler()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=output.parent) as work:
        draft = Path(work) / "draft.so"
        if ninja := find_ninja():
            Path(work, "build.ninja").write_text(ninja_file(recipe, command, draft))
            run([ninja, "-C", work])
        else:
            sources = map(str, recipe.sources)
            run([*command, "-shared", *recipe.link, *sources, "-o", str(draft)])
        draft.replace(output)


def find_ninja() -> str | None:
    """Find ninja on the PATH, or in this Python's folder, where pip puts it."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def ninja_file(recipe: BuildRecipe, command: list[str], output: Path) -> str:
    """One object a source, compiled side by side, and the library from all of them."""
    compiling = shlex.join(command).replace("$", "$$")
    linking = shlex.join([*command, "-shared", *recipe.link]).replace("$", "$$")
    objects = [f"{source.stem}.o" for source in recipe.sources]
    return "\n".join(
        (
            f"rule compile\n  command = {compiling} -c $in -o $out",
            f"rule link\n  command = {linking} $in -o $out",
            *(
                f"build {target}: compile {_ninja_path(source)}"
                for target, source in zip(objects, recipe.sources, strict=True)
            ),
            f"build {_ninja_path(output)}: link {' '.join(objects)}",
            "",
        )
    )


def _ninja_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def run(command: list[str]) -> str:
    """What a build command prints; raises KernelUnavailable with its output if it fails."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise KernelUnavailable(f"{command[0]} failed: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def cached_library(recipe: BuildRecipe | None = None) -> Path:
    """The library (cpu's) of these sources from the user's cache; built if missing.

    Raises KernelUnavailable.
    """
    recipe = recipe or cpu()
    try:
        folder = cache_folder()
        library = folder / f"{recipe.name}-{recipe.fingerprint(recipe.compiler())}.so"
        if not library.exists():
            with lock(folder / "lock"):
                if not library.exists():
                    compile_library(library, recipe)
    except OSError as error:
        raise KernelUnavailable(f"can't build {recipe.name}: {error}") from error
    return library


def install_library(output: Path, recipe: BuildRecipe) -> None:
    """Put the library at `output`, where all of it appears at once.

    It comes from the user's cache, which is given what it lacks; it is only compiled where there
    can be no cache. Raises KernelUnavailable with the compiler's own words.
    """
    try:
        cache_folder()
    except (OSError, RuntimeError, KernelUnavailable):  # RuntimeError: the user has no home
        compile_library(output, recipe)
        return
    library = cached_library(recipe)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=output.parent) as work:
        Path(shutil.copy(library, Path(work) / "draft.so")).replace(output)


def cache_folder() -> Path:
    """kvmig's folder in the user's cache. Code is loaded from it, so no other user may write there.

    Raises KernelUnavailable if another user may.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "kvmig"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        why = "must belong to this user and be writable by no other user"
        raise KernelUnavailable(f"{folder} {why}")
    return folder


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` against other processes. Raises KernelUnavailable."""
    try:
        file = lock_file(path, TIMEOUT_S, 0.05)
    except TimeoutError:
        raise KernelUnavailable(f"{path} is locked by another build") from None
    with file:
        yield
