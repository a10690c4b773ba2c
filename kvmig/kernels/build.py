"""Compiles csrc into the copy library: in setup.py, or once per user at first use."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvmig.ground.errors import KernelUnavailable

CSRC = Path(__file__).parent / "csrc"
SOURCES = (CSRC / "copy_cpu.cpp",)
HEADERS = (CSRC / "kvmig_copy.h",)
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra")
TIMEOUT_S = 120.0
"""Longest wait for the compiler, and for another process that compiles."""


def compiler() -> list[str]:
    """The C++ compiler as a command: $CXX, or the first of the usual names on the path."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise KernelUnavailable("no C++ compiler found (looked for $CXX, g++, c++, clang++)")


def compile_library(output: Path) -> None:
    """Build the library at `output`; whoever looks there sees all of it or none.

    Raises KernelUnavailable with the compiler's own words.
    """
    with tempfile.TemporaryDirectory(prefix=".building-", dir=output.parent) as work:
        draft = Path(work) / "draft.so"
        compile_command = [*compiler(), *FLAGS]
        if ninja := shutil.which("ninja"):
            Path(work, "build.ninja").write_text(ninja_file(compile_command, draft))
            run([ninja, "-C", work])
        else:
            run([*compile_command, "-shared", *map(str, SOURCES), "-o", str(draft)])
        draft.replace(output)


def ninja_file(compile_command: list[str], output: Path) -> str:
    """One object a source, compiled side by side, and the library from all of them."""
    command = shlex.join(compile_command).replace("$", "$$")
    objects = [f"{source.stem}.o" for source in SOURCES]
    return "\n".join(
        (
            f"rule compile\n  command = {command} -c $in -o $out",
            f"rule link\n  command = {command} -shared $in -o $out",
            *(
                f"build {target}: compile {_ninja_path(source)}"
                for target, source in zip(objects, SOURCES, strict=True)
            ),
            f"build {_ninja_path(output)}: link {' '.join(objects)}",
            "",
        )
    )


def _ninja_path(path: Path) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def run(command: list[str]) -> None:
    """Run a build command; raises KernelUnavailable with its output if it fails."""
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise KernelUnavailable(f"{command[0]} failed: {(done.stdout + done.stderr).strip()}")


def cached_library() -> Path:
    """The library that belongs to these sources, from the user's cache; built if missing.

    Raises KernelUnavailable.
    """
    try:
        folder = cache_folder()
        library = folder / f"libkvmig_copy-{fingerprint()}.so"
        if not library.exists():
            with lock(folder / "lock"):
                if not library.exists():
                    compile_library(library)
    except OSError as error:
        raise KernelUnavailable(f"can't build the copy library: {error}") from error
    return library


def fingerprint() -> str:
    """Differs when the library that the sources give would differ."""
    digest = hashlib.sha256(repr((FLAGS, platform.machine())).encode())
    for path in (*HEADERS, *SOURCES):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """kvmig's folder in the user's cache. Code is loaded from it, so nobody else may write there.

    Raises KernelUnavailable if somebody else may.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(root) if root else Path.home() / ".cache") / "kvmig"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise KernelUnavailable(f"{folder} must belong to this user and be writable by nobody else")
    return folder


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold `path` against other processes; the kernel lets go of it if we die."""
    deadline = time.monotonic() + TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KernelUnavailable(f"{path} is locked by another build") from None
                time.sleep(0.05)
        yield
