"""The kit for a machine with a GPU and no network, packed of stand-ins for the wheels."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import gpu_kit
from scripts.fatbins import (
    CUBIN,
    ENTRY,
    HEADER,
    LEAST_ENTRY,
    MAGIC,
    PTX,
    fat_binaries,
    loaded_by,
    prune_file,
)
from scripts.setup_env import ROOT

Code = tuple[int, int, bytes]
"""Kind, architecture and the code itself."""


def fat_binary(*entries: Code) -> bytes:
    """As nvcc writes it."""
    packed = b""
    for kind, architecture, code in entries:
        header = bytearray(LEAST_ENTRY)
        ENTRY.pack_into(header, 0, kind, 1, LEAST_ENTRY, len(code))
        struct.pack_into("<I", header, 28, architecture)
        packed += bytes(header) + code
    return HEADER.pack(MAGIC, 1, HEADER.size, len(packed)) + packed


def pruned(path: Path, *parts: bytes) -> bytes:
    """A library of these parts, without what an H100 wouldn't load."""
    path.write_bytes(b"".join(parts))
    prune_file(path, 90)
    return path.read_bytes()


def test_other_gpus_machine_code_is_zeroed_and_nothing_else(tmp_path: Path) -> None:
    for_all = (CUBIN, 80, b"old"), (CUBIN, 90, b"hopper"), (PTX, 90, b"text"), (CUBIN, 100, b"new")
    left = (
        (CUBIN, 80, bytes(3)),
        (CUBIN, 90, b"hopper"),
        (PTX, 90, bytes(4)),
        (CUBIN, 100, bytes(3)),
    )

    found = pruned(tmp_path / "library", b"\x7fELF", fat_binary(*for_all), b"strings" + MAGIC)

    assert found == b"\x7fELF" + fat_binary(*left) + b"strings" + MAGIC


def test_of_kernels_without_code_for_the_gpu_the_newest_ptx_for_it_stays(tmp_path: Path) -> None:
    entries = (CUBIN, 80, b"code"), (PTX, 75, b"older"), (PTX, 80, b"newer"), (PTX, 100, b"others")
    left = (CUBIN, 80, bytes(4)), (PTX, 75, bytes(5)), (PTX, 80, b"newer"), (PTX, 100, bytes(6))

    assert pruned(tmp_path / "library", fat_binary(*entries)) == fat_binary(*left)


@given(
    st.lists(
        st.tuples(st.sampled_from((PTX, CUBIN)), st.integers(50, 120), st.binary(max_size=20)),
        min_size=1,
    )
)
def test_an_entry_that_is_loaded_is_one_that_the_gpu_can_load(entries: list[Code]) -> None:
    (found,) = fat_binaries(b"before" + fat_binary(*entries))

    assert [(one.kind, one.architecture) for one in found] == [one[:2] for one in entries]
    for one in loaded_by(found, 90):
        assert one.architecture == 90 or (one.kind == PTX and one.architecture < 90)


@given(st.binary(max_size=200))
def test_what_only_looks_like_a_fat_binary_is_left_alone(data: bytes) -> None:
    assert all(one for one in fat_binaries(MAGIC + data))


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """An environment's packages, each a file or two."""
    made = tmp_path / "site-packages"
    names = (
        "vllm/__init__.py", "vllm/__pycache__/a.pyc", "vllm/vllm-rs", "torch/lib/libtorch.so",
        "torch/include/a.h", "nvidia/nccl/lib/libnccl.so.2", "nvidia/cudnn/lib/libcudnn.so",
        "flashinfer/__init__.py", "nvidia_ml_py-13.dist-info/METADATA", "pynvml.py",
        "pip/__init__.py", "setuptools/__init__.py",
    )  # fmt: skip
    for name in names:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(name)
    return made


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_what_vllm_starts_without_is_left(packages: Path, tmp_path: Path) -> None:
    gpu_kit.stage_packages(packages, tmp_path / "site")

    assert sorted(files_in(tmp_path / "site")) == [
        "nvidia/nccl/lib/libnccl.so.2", "nvidia_ml_py-13.dist-info/METADATA", "pynvml.py",
        "setuptools/__init__.py", "torch/lib/libtorch.so", "vllm/__init__.py",
    ]  # fmt: skip


def test_pieces_become_the_same_files_elsewhere(packages: Path, tmp_path: Path) -> None:
    kit, out, there = tmp_path / "kit", tmp_path / "out", tmp_path / "there"
    gpu_kit.stage_packages(packages, kit / "site")
    (kit / "site" / "noise").write_bytes(os.urandom(5000))

    pieces = gpu_kit.pack(kit, out, piece_bytes=1000)

    assert len(pieces) > 5
    assert all(one.stat().st_size <= 1000 for one in pieces)
    unpack(out, there)
    found = files_in(there)
    activates = found.pop("activate.sh").decode()
    assert found == files_in(kit)
    assert f"PYTHONPATH={there}/site:{there}/kvmig" in activates


def test_the_project_comes_as_git_knows_it_with_the_kernels_that_are_built(tmp_path: Path) -> None:
    gpu_kit.stage_project(ROOT, tmp_path)

    assert (tmp_path / "bench" / "gpu.sh").stat().st_mode & 0o100
    assert list((tmp_path / "kvmig" / "kernels" / "_lib").glob("*.so"))
    assert not (tmp_path / ".git").exists()


def test_a_piece_that_came_broken_is_refused(packages: Path, tmp_path: Path) -> None:
    (first, *_) = gpu_kit.pack(packages, tmp_path / "out", piece_bytes=100)
    first.write_bytes(b"broken")

    with pytest.raises(subprocess.CalledProcessError) as found:
        unpack(tmp_path / "out", tmp_path / "there")
    assert b"kit.00" in found.value.stdout + found.value.stderr


def unpack(pieces: Path, where: Path) -> None:
    """As somebody does on the other machine, whose torch brings nothing of NVIDIA's here."""
    subprocess.run(
        ["bash", str(pieces / "unpack.sh"), str(where)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        check=True,
        timeout=120,
    )
