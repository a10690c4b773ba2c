"""Load libraries so that the process can still be forked: one thread, and no driver open.

Libraries start threads when they are imported, and a fork has none of them. Three kinds are known:
a BLAS starts a thread a core unless its variable says 1; a thread pool or a reaper of a background
process ends by itself, and is waited for; any other stays, and the process can't be forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kvmig.process.child import begin_loading, end_loading, lead_group, quiet
from kvmig.process.loaded_files import note

ONE_THREAD = ("OPENBLAS_NUM_THREADS",)
"""Variables of the BLAS libraries of NumPy, SciPy and OpenCV, which no engine computes with. Each
reads them once, when it is loaded, and starts its threads then."""
ENDING_S = 10.0
"""Time for threads to end that libraries have started while they were imported."""
LOOK_S = 0.02
TASKS = Path("/proc/self/task")
DESCRIPTORS = Path("/proc/self/fd")
GPUS = "/dev/nvidia"
"""Files of NVIDIA's driver, opened by cuInit: it fails in a fork of who has called it."""
NVML = "libnvidia-ml.so.1"
NVML_USERS = 64
"""More than have ever opened NVML in one process."""


def make_forkable(*loads: Callable[[], object]) -> str:
    """Load, in this order, as one to be forked; why it can't be, or nothing."""
    lead_group()
    quiet("fork server")
    began_ns = time.time_ns()
    begin_loading()
    with one_blas_thread():
        for one in loads:
            one()
    end_loading()
    note(began_ns)
    close_nvml()
    return unsafe()


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let libraries that are loaded in the block start no threads for a BLAS.

    The user's own numbers are back in the environment after the block.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def unsafe(patience_s: float = ENDING_S) -> str:
    """The reason why this process can't be forked any more; empty if it can.

    patience_s: time for threads of Python's to end.
    """
    deadline = time.monotonic() + patience_s
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    if names := others(task_names(), python_names()):
        return f"loading has started {len(names)} threads: {', '.join(names)}"
    if opened_gpu():
        return "loading has opened NVIDIA's driver"
    return ""


def others(tasks: Mapping[int, str], python: Mapping[int, str]) -> list[str]:
    """Names of all threads but the first: the system's, and Python's where it knows the thread.

    tasks, python: names by the system's number of a thread.
    """
    first = os.getpid()
    return [
        f"{name} ({python[number]})" if number in python else name
        for number, name in sorted(tasks.items())
        if number != first
    ]


def task_names(tasks: Path = TASKS) -> dict[int, str]:
    """The system's name of each thread of this process, by number."""
    found = {}
    for one in tasks.iterdir():
        with contextlib.suppress(OSError):  # it has ended since
            found[int(one.name)] = (one / "comm").read_text().strip()
    return found


def python_names() -> dict[int, str]:
    """Python's name of each thread that it has started, by number."""
    every = ((one.native_id, one.name) for one in threading.enumerate())
    return {number: name for number, name in every if number is not None}


def close_nvml() -> None:
    """Close NVML as often as libraries have opened it here: torch and Triton leave it open.

    An open NVML holds files of the driver, by which `opened_gpu` knows who has called cuInit. Its
    users open it again before each look.
    """
    try:
        nvml = ctypes.CDLL(NVML, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # it isn't loaded
        return
    for _ in range(NVML_USERS):
        if nvml.nvmlShutdown():  # it isn't open any more
            return


def opened_gpu(descriptors: Path = DESCRIPTORS) -> bool:
    """Whether this process has a file of NVIDIA's driver open."""
    for one in descriptors.iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, gone by now
            if str(one.readlink()).startswith(GPUS):
                return True
    return False
