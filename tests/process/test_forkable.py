"""A process that shall be forked has one thread and no driver open, or says what it has."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.process.forkable import one_blas_thread, opened_gpu, others, unsafe
from tests.support import cuda_stubs

OPENS_NVML = """
import ctypes
from kvmig.process import forkable
library = ctypes.CDLL("libnvidia-ml.so.1")
for _ in range(3):
    library.nvmlInit()
forkable.GPUS = {device!r}
assert forkable.unsafe() == "loading has opened NVIDIA's driver"
forkable.close_nvml()
print(forkable.unsafe())
"""


@pytest.fixture
def reaper() -> Iterator[threading.Event]:
    """A thread that waits until the test is over, or lets it end."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="build-reaper")
    thread.start()
    yield over
    over.set()
    thread.join()


def test_a_thread_that_stays_is_named(reaper: threading.Event) -> None:
    assert "(build-reaper)" in unsafe(patience_s=0.05)


def test_threads_have_the_systems_name_and_pythons_where_it_knows_them() -> None:
    own = os.getpid()
    tasks = {own: "python", own + 1: "python", own + 2: "cuda-EvtHandlr"}

    assert others(tasks, {own: "MainThread", own + 1: "reaper"}) == [
        "python (reaper)", "cuda-EvtHandlr"
    ]  # fmt: skip


def test_a_thread_that_ends_by_itself_is_waited_for() -> None:
    ends = (
        "import threading, time; from kvmig.process.forkable import unsafe;"
        "threading.Thread(target=time.sleep, args=(0.3,)).start(); print(unsafe())"
    )
    done = subprocess.run(
        [sys.executable, "-c", ends], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "\n"


def test_libraries_are_loaded_with_one_thread_of_a_blas_whatever_the_user_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    with one_blas_thread():
        assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    assert os.environ["OPENBLAS_NUM_THREADS"] == "8"
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    with one_blas_thread():
        pass
    assert "OPENBLAS_NUM_THREADS" not in os.environ


def test_a_process_that_has_called_nvidias_driver_is_not_forked(tmp_path: Path) -> None:
    """torch.cuda.is_available() calls it, and torch doesn't say so."""
    for number, file in enumerate(("/dev/null", "/dev/nvidia-gone")):
        (tmp_path / str(number)).symlink_to(file)
    assert opened_gpu(tmp_path)
    (tmp_path / "1").unlink()
    assert not opened_gpu(tmp_path)


def test_nvml_that_a_library_has_left_open_is_closed_however_often_it_was_opened(
    tmp_path: Path,
) -> None:
    device = tmp_path / "nvidiactl"
    device.touch()
    cuda_stubs.build(tmp_path, (), device)
    done = subprocess.run(
        [sys.executable, "-c", OPENS_NVML.format(device=str(device))],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("\n", "")
