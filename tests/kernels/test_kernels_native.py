"""The C++ twin: built, loaded, and clean under the sanitizers."""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels import abi, build, native
from kvmig.kernels.api import BlockCopy, CopyKernels

ROOT = Path(__file__).parents[2]
DRIVERS = sorted((ROOT / "tests" / "native").glob("*_driver.cpp"))


# -- what it refuses by itself, without the checks in Python


MEMORY = np.zeros(64, np.uint8)
HERE = MEMORY.ctypes.data
IDS = np.zeros(1, np.int64)
RUN, OTHER = BlockRegion(HERE, 8, 8), BlockRegion(HERE, 9, 9)


@pytest.mark.parametrize(
    "call",
    [
        lambda by: by.copy(BlockCopy([RUN], [OTHER], IDS, IDS), checksums=True),
        lambda by: by.copy(BlockCopy([BlockRegion(0, 8, 8)], [RUN], IDS, IDS), checksums=True),
        lambda by: by.copy(BlockCopy([RUN], [RUN], IDS, IDS), checksums=True, workers=-1),
        lambda by: by.checksum([BlockRegion(HERE, 8, -8)], IDS),
    ],
)
def test_the_library_refuses_what_can_not_be(call: functools.partial[CopyKernels]) -> None:
    with pytest.raises(ValueError, match="the kernel library refused its arguments"):
        call(native.load())
    assert not MEMORY.any()


def test_what_needs_a_gpu_is_unsupported() -> None:
    library = abi.load(build.cached_library(), "cpu")
    with pytest.raises(KernelUnavailable, match="can't do this on this device"):
        abi.check(library.kvmig_copy_tma(None, None, 0, None, None, 0, None, None, 0))


def test_a_status_of_cuda_is_an_error_with_its_number() -> None:
    with pytest.raises(KvmigError, match="CUDA error 700"):
        abi.check(abi.CUDA_ERROR + 700)


def test_a_child_of_a_fork_copies_with_threads_of_its_own() -> None:
    """The threads of the parent, and maybe a lock that they held, are not there any more."""
    code = """
import os, numpy as np
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.native import load
size = 1 << 20
memory = np.arange(8 * size, dtype=np.uint8)
other = np.zeros(8 * size, np.uint8)
ids = np.arange(8)
def copied():
    regions = [BlockRegion(a.ctypes.data, size, size) for a in (memory, other)]
    blocks = BlockCopy(regions[:1], regions[1:], ids, ids)
    sums = load().copy(blocks, checksums=True, workers=3).wait()
    return len(sums) == 8 and np.array_equal(memory, other)
assert copied()
other[:] = 0
child = os.fork()
if not child:
    os._exit(0 if copied() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- building and loading


@pytest.fixture
def uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No packaged library, and an empty cache of this test's own."""
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvmig"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds in half the time, where the test is not about what is built."""
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O0"))


def test_the_versions_of_header_and_loader_agree() -> None:
    header = (ROOT / "csrc" / "kvmig.h").read_text()
    (version,) = re.findall(r"#define KVMIG_ABI_VERSION (\d+)", header)
    assert int(version) == abi.ABI_VERSION


def test_every_function_of_the_header_is_declared() -> None:
    header = (ROOT / "csrc" / "kvmig.h").read_text()
    named = set(re.findall(r"^\w[\w ]*\*? ?\*?(kvmig_\w+)\(", header, re.MULTILINE))
    assert named == {*abi.PROTOTYPES, "kvmig_abi_version", "kvmig_backend"}


@pytest.mark.usefixtures("quick")
def test_a_missing_library_is_built_once_into_the_users_cache(uninstalled: Path) -> None:
    native.load()
    (library,) = uninstalled.glob("*.so")
    assert stat.S_IMODE(uninstalled.stat().st_mode) == 0o700
    built = library.stat().st_mtime_ns
    native.load()
    assert library.stat().st_mtime_ns == built
    assert {path.name for path in uninstalled.iterdir()} == {library.name, "lock"}


def test_an_installation_imports_no_torch() -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['setup.py', '--name'];"
        " runpy.run_path('setup.py', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["kvmig"]), done.stderr


@pytest.mark.usefixtures("quick", "uninstalled")
def test_it_is_built_without_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which

    def which(name: str, mode: int = os.F_OK | os.X_OK, path: str | None = None) -> str | None:
        return None if name == "ninja" else found(name, mode, path)

    monkeypatch.setattr(shutil, "which", which)
    native.load()


def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "PACKAGED", build.cached_library())
    monkeypatch.setattr(abi, "ABI_VERSION", abi.ABI_VERSION + 1)
    with pytest.raises(KernelUnavailable, match=r"has ABI version 4, not 5"):
        native.load()


def test_a_library_for_another_device_is_not_used() -> None:
    with pytest.raises(KernelUnavailable, match="is for cpu, not for cuda"):
        abi.load(build.cached_library(), "cuda")


@pytest.mark.usefixtures("quick")
def test_a_damaged_library_is_built_anew(
    uninstalled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(native, "PACKAGED", damaged)
    native.load()
    assert list(uninstalled.glob("*.so"))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    uninstalled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("#error no luck today\n")
    monkeypatch.setattr(build, "SOURCES", (broken,))
    with pytest.raises(KernelUnavailable, match="no luck today"):
        native.load()
    assert [path.name for path in uninstalled.iterdir()] == ["lock"]


@pytest.mark.usefixtures("uninstalled")
def test_a_build_that_somebody_else_keeps_locked_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "TIMEOUT_S", 0.1)
    lock = build.cache_folder() / "lock"
    with build.lock(lock), pytest.raises(KernelUnavailable, match="locked by another build"):
        native.load()


def test_a_cache_that_others_may_write_is_refused(uninstalled: Path) -> None:
    uninstalled.mkdir(parents=True)
    uninstalled.chmod(0o777)
    with pytest.raises(KernelUnavailable, match="writable by no other user"):
        native.load()


# -- the sanitizers


@functools.cache
def sanitized(kind: str, folder: Path) -> Path | str:
    """The C++ twin as objects, compiled once with this sanitizer; or why it can't be."""
    if not shutil.which("g++"):
        return "g++ is not installed"
    probe = folder / "probe.cpp"
    probe.write_text("int main() {}\n")
    command = ["g++", f"-fsanitize={kind}", str(probe), "-o", str(folder / "probe")]
    if subprocess.run(command, check=False, capture_output=True, timeout=60).returncode:
        return f"g++ has no {kind} sanitizer here"
    flags = ["-std=c++17", "-g", "-O1", "-pthread", f"-fsanitize={kind}", "-fno-sanitize-recover"]
    sources = map(str, build.SOURCES)
    subprocess.run(
        ["g++", *flags, "-c", f"-I{build.CSRC}", *sources], cwd=folder, check=True, timeout=240
    )
    return folder


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["address,undefined", "thread"])
@pytest.mark.long
def test_the_library_is_clean_under_the_sanitizers(
    driver: Path, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """C++ drivers: odd sizes at the very ends of heap blocks, and several threads."""
    folder = tmp_path_factory.getbasetemp() / kind.replace(",", "-")
    folder.mkdir(exist_ok=True)
    objects = sanitized(kind, folder)
    if isinstance(objects, str):
        pytest.skip(objects)
    program = objects / driver.stem
    flags = ["-std=c++17", "-g", "-O1", "-pthread", f"-fsanitize={kind}", "-fno-sanitize-recover"]
    parts = [str(path) for path in objects.glob("*_cpu.o")]
    subprocess.run(
        ["g++", *flags, f"-I{build.CSRC}", str(driver), *parts, "-o", str(program)],
        check=True,
        timeout=120,
    )
    # vLLM sets LD_PRELOAD in a process that makes a configuration; the sanitizers want to be first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [program], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, whose places have its number as their text."""
    done: list[str] = []

    def compile_it(output: Path, recipe: build.BuildRecipe | None = None) -> None:
        done.append(output.name)
        output.write_text(str(len(done)))

    monkeypatch.setattr(build, "compile_library", compile_it)
    return done


@pytest.mark.usefixtures("uninstalled")
def test_an_installation_compiles_what_the_users_cache_lacks_and_no_more(
    tmp_path: Path, compiled: list[str]
) -> None:
    for name in ("first.so", "second.so"):
        build.install_library(tmp_path / name, build.cpu())
        assert (tmp_path / name).read_text() == "1"
    assert len(compiled) == 1
    assert not list(tmp_path.glob(".building-*"))


def test_an_installation_compiles_where_there_can_be_no_cache(
    uninstalled: Path, tmp_path: Path, compiled: list[str]
) -> None:
    uninstalled.mkdir(parents=True)
    uninstalled.chmod(0o777)  # others may write there
    build.install_library(tmp_path / "first.so", build.cpu())
    assert compiled == ["first.so"]
    assert not list(uninstalled.iterdir())
