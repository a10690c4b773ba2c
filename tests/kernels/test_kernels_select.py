from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError, KernelUnavailable
from kvmig.kernels import native, select
from kvmig.kernels.copy import checksum_fused
from kvmig.kernels.native import NativeKernels
from kvmig.kernels.reference import ReferenceKernels
from kvmig.kernels.select import VARIABLE, kernels
from tests.support import fake_gpu
from tests.support.inside import forget_kernels


@pytest.fixture(autouse=True)
def chosen_anew() -> Iterator[None]:
    """Nothing is remembered from or for other tests."""
    forget_kernels()
    yield
    forget_kernels()


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library, and nothing that could build one."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "PACKAGED", tmp_path / "none.so")


def test_memory_of_the_host_is_copied_by_the_library() -> None:
    assert isinstance(kernels("cpu"), NativeKernels)


def test_the_choice_is_made_once() -> None:
    assert kernels("cpu") is kernels("cpu")


def test_another_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "reference")
    assert isinstance(kernels("cpu"), ReferenceKernels)


def test_an_unknown_name_is_refused_with_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "opencl")
    wanted = "KVMIG_KERNELS=opencl is not one of cuda, nvrtc, triton, cpu, reference"
    with pytest.raises(ConfigError, match=wanted):
        kernels("cpu")


@pytest.mark.parametrize("name", ["cuda", "nvrtc", "triton"])
def test_what_can_not_run_here_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if not _is_missing(name):
        pytest.skip(f"{name} runs here")
    monkeypatch.setenv(VARIABLE, name)
    with pytest.raises(KernelUnavailable, match=f"KVMIG_KERNELS={name}: ."):
        kernels("cpu")


def _is_missing(name: str) -> bool:
    device = "cpu" if name == "triton" else "cuda"
    try:
        select.load(name, device)  # type: ignore[arg-type]
    except KernelUnavailable:
        return True
    return False


def test_kernels_of_the_host_are_not_forced_upon_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cpu")
    with pytest.raises(KernelUnavailable, match=r"KVMIG_KERNELS=cpu: .* memory of cuda"):
        kernels("cuda")


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_does_it_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert len(checksum_fused(b"12345678", 8)) == 1
    checksum_fused(b"12345678", 8)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["no C++ compiler" in record.getMessage() for record in warnings] == [True]


def test_choosing_for_the_host_loads_no_torch() -> None:
    code = (
        "import sys; from kvmig.kernels.select import kernels; kernels('cpu'); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"torch", "triton", "cupy"} & set(done.stdout.split())


def test_a_driver_older_than_the_library_is_named_and_the_next_kernels_are_taken(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13: it was one word with a machine without a GPU, and noticed at the first migration."""
    monkeypatch.setenv("KVMIG_FAKE_OLD", "1")
    monkeypatch.setenv("KVMIG_FAKE_VERSION", "12080")
    with pytest.raises(KernelUnavailable, match=r"too old: it is for CUDA 12\.8, and kvmig's CUDA"):
        select.load("cuda", "cuda")
    monkeypatch.setenv(VARIABLE, "cuda")
    with pytest.raises(KernelUnavailable, match=r"KVMIG_KERNELS=cuda: .* driver is too old"):
        kernels("cuda")


def test_kernels_that_fail_on_this_gpu_are_not_taken(gpus: None) -> None:
    fake_gpu.fail("cuMemcpyHtoDAsync_v2")
    with pytest.raises(KernelUnavailable, match="cuda kernels don't run on this GPU: cuMemcpy"):
        select.load("cuda", "cuda")
