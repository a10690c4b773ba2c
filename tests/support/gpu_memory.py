"""A worker of vLLM's on a CPU counts its memory as one on a GPU does, on the tests' own GPUs
(`tests.support.fake_devices`), as one H100 showed it on 26 November 2026:

- it starts only where that part of the GPU is free that it is to take;
- it measures by what is free before and after, so that others who take or give back memory
  meanwhile are counted as itself;
- weights, working memory, graphs and KV cache are missing for the next one, until it ends, or
  sleeps, which no GPU has shown so far;
- steps of engines on one GPU take turns, if each has one worker.

Nothing of that memory is there in truth: the sizes are numbers, made up but for the cache's, which
is what is left.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import request_memory

from kvmig.core.devices import DeviceRecord
from kvmig.process.nvml import read_devices
from tests.support.fake_devices import FOLDER, GIB, STEPS, FakeMachine
from tests.support.sleeping_worker import SleepingWorker

CONTEXT, WEIGHTS, WORKING, GRAPHS = GIB // 2, 2 * GIB, GIB, GIB // 4
LOADS_S, WORKS_S = 0.1, 0.4


class WorkerMemory:
    """What one worker has of its GPU."""

    def __init__(self, rank: int) -> None:
        self._machine = FakeMachine(Path(os.environ[FOLDER]))
        self._id = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[rank]
        self.uuid = self.device().uuid
        self._has = 0
        self.take(CONTEXT)
        self.before = self.device().free

    def device(self) -> DeviceRecord:
        """As it is now."""
        return read_devices(os.environ).device(self._id)

    def take(self, nbytes: int) -> None:
        """More than before; negative: give back. Raises MemoryError where it isn't free."""
        if nbytes > self.device().free:
            raise MemoryError(f"CUDA out of memory: {nbytes} of {self.device().free} bytes")
        self._has += nbytes
        self._machine.take(self.uuid, self._has)

    def measure(self, requested: int, cache: int | None) -> int:
        """Bytes for the KV cache, as vLLM finds them. cache: the size that it is given."""
        with self._working():
            time.sleep(WORKS_S)
        if cache is not None:
            return cache
        free = self.device().free
        assert self.before >= free, "Error in memory profiling"
        return requested - (self.before - free) - WORKING - GRAPHS

    @contextmanager
    def _working(self) -> Iterator[None]:
        self.take(WORKING)
        try:
            yield
        finally:
            self.take(-WORKING)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One engine computes at a time."""
        folder = Path(os.environ[FOLDER])
        with (folder / f"turn-{self.uuid}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            began = time.monotonic()
            yield
            line = f"{self.uuid} {os.getpid()} {began:.6f} {time.monotonic():.6f}\n"
            with (folder / STEPS).open("a") as steps:
                steps.write(line)


class CountingWorker(CPUWorker):
    """vLLM's `worker_cls` of such an engine."""

    own_memory: WorkerMemory
    found = 0
    """Bytes for its KV cache."""
    sleeper: SleepingWorker
    """Of its last sleep."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        whole = SimpleNamespace(total_memory=1 << 50, available_memory=1 << 50)
        with pytest.MonkeyPatch.context() as patch:  # it takes its share of a GPU, not of the host
            patch.setattr(cpu_worker, "get_memory_node_info", lambda node: whole)
            super().__init__(*arguments, **options)

    def init_device(self) -> None:
        super().init_device()
        self.own_memory = own = WorkerMemory(self.local_rank)
        snapshot = SimpleNamespace(
            device_=f"cuda:{self.local_rank}",
            free_memory=own.before,
            total_memory=own.device().total,
        )
        self.requested_memory = request_memory(snapshot, self.cache_config)

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        self.own_memory.take(WEIGHTS)
        time.sleep(LOADS_S)

    def determine_available_memory(self) -> int:
        given = self.cache_config.kv_cache_memory_bytes
        self.found = self.own_memory.measure(self.requested_memory, given)
        return self.found

    def compile_or_warm_up_model(self) -> Any:
        self.own_memory.take(max(0, self.found) + GRAPHS)
        return super().compile_or_warm_up_model()

    def sleep(self, level: int = 1) -> None:
        """All but the context comes free."""
        self.sleeper = SleepingWorker(self)
        self.sleeper.sleep(level)
        self.own_memory.take(-self._asleep)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The memory is taken again."""
        self.own_memory.take(self._asleep)
        self.sleeper.wake_up(tags)

    @property
    def _asleep(self) -> int:
        return WEIGHTS + GRAPHS + max(0, self.found)

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        if self.parallel_config.world_size > 1:
            # A GPU's turns are shorter than a step, whose workers wait for each other.
            return super().execute_model(*arguments, **options)
        with self.own_memory.turn():
            return super().execute_model(*arguments, **options)
