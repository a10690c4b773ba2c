"""Memory, time and kernels of the device that a part runs on: `cuda`, or `cpu` in its tests."""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch

from bench.report import Result, parser, say
from kvmig.core.errors import KvmigError
from kvmig.engines.device_copies import CTAS_OF_TMA, CTAS_WITHOUT_TMA
from kvmig.kernels import select
from kvmig.kernels.api import BlockCopy, CopyKernels, Device, PendingWork
from kvmig.kernels.gpu import GpuKernels

TMA = "cuda-tma"
"""The way through the TMA."""
POISON = 0xA5
SKIPPED = 3
"""Exit status of a part for which something isn't installed."""


class Copy(Protocol):
    """`face.CopyKernels.copy`, by whichever way."""

    def __call__(
        self, blocks: BlockCopy, *, checksums: bool, stream: int, workers: int
    ) -> PendingWork: ...


@dataclass(frozen=True, slots=True)
class Way:
    """One way to copy. capped: it heeds `workers`; summing: it heeds `checksums`."""

    name: str
    copy: Copy
    capped: bool = True
    summing: bool = True


class Deadline:
    """A part stops by itself some time before it is killed, so that its figures are kept."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def over(self, result: Result) -> bool:
        """Whether to stop now, which the result then says."""
        if time.monotonic() < self._end:
            return False
        say(f"stopped after {self._seconds:g} s")
        result.samples.append({"stopped": f"after {self._seconds:g} s"})
        return True


def between_gpus(by: CopyKernels) -> Callable[..., PendingWork]:
    """The copy that the product makes to a GPU's buffer and from it, on its CTAs."""
    if by.device == "cpu":
        return by.copy
    if isinstance(by, GpuKernels) and by.has_tma:
        return partial(by.copy_tma, workers=CTAS_OF_TMA)
    return partial(by.copy, workers=CTAS_WITHOUT_TMA)


class Site:
    """One device and, on a GPU, a stream that isn't the default one: `stream`, or its own."""

    def __init__(self, device: Device, only: str = "", stream: Any = None) -> None:
        self.device = device
        self._names = [only] if only else list(select.ORDER[device][:-1])
        self._stream: Any = stream or (torch.cuda.Stream() if device == "cuda" else None)
        self.reasons: dict[str, str] = {}
        """Kernels that can't run here, and why."""

    @property
    def stream(self) -> int:
        """As the kernels take it."""
        return int(self._stream.cuda_stream) if self._stream else 0

    @property
    def multiprocessors(self) -> int:
        if self.device == "cpu":
            return 2
        return int(torch.cuda.get_device_properties(0).multi_processor_count)

    def memory(self, nbytes: int, fill: int | None = None) -> torch.Tensor:
        """[nbytes] uint8, of `fill` or at random."""
        if fill is not None:
            return torch.full((nbytes,), fill, dtype=torch.uint8, device=self.device)
        words = torch.empty(-(-nbytes // 8), dtype=torch.int64, device=self.device)
        words.random_()
        return words.view(torch.uint8)[:nbytes]

    def kernels(self) -> dict[str, CopyKernels]:
        """All that load here but the reference; `reasons` says why others don't."""
        found: dict[str, CopyKernels] = {}
        for name in self._names:
            try:
                found[name] = select.load(name, self.device)
            except KvmigError as error:
                self.reasons[name] = str(error)
                say(f"no {name}: {error}")
        if not found:
            raise KvmigError(f"no kernels for {self.device}: {self.reasons}")
        return found

    def ways(self) -> list[Way]:
        """The copies of all kernels, and the others that the CUDA library has."""
        found = self.kernels()
        ways = [Way(name, kernels.copy) for name, kernels in found.items()]
        if "cuda" in found:
            from bench.gpu.cuda_ways import engine, tma

            # The TMA last: a fault there would spoil the device for the rest of the process.
            ways += [engine(), *tma(found["cuda"])]
        return ways

    def variants(self) -> list[Way]:
        """Kernels that might take the place of the CUDA library's; `reasons` says why none is
        here. None where only some kernels are asked for."""
        if self.device == "cpu" or len(self._names) == 1:
            return []
        from bench.gpu.cuda_ways import variants

        try:
            return variants(select.load("cuda", self.device))
        except (KvmigError, OSError) as error:
            self.reasons["variants"] = str(error)
            say(f"no variants: {error}")
            return []

    def seconds(self, work: Callable[[], object], repeats: int = 5, calls: int = 2) -> float:
        """Median time of one call, of `calls` queued one behind the other, after a warm-up."""
        work()
        self.settle()
        return median(self._timed(work, calls) for _ in range(repeats)) / calls

    def _timed(self, work: Callable[[], object], calls: int) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                work()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(self._stream)
        for _ in range(calls):
            work()
        last.record(self._stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def settle(self) -> None:
        """Wait for all that was queued."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def queue(self) -> Iterator[None]:
        """Torch's work inside goes to this site's stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def copy_ceiling(self, nbytes: int) -> float:
        """GB/s of payload of one large copy in the device's memory, by torch."""
        source = self.memory(nbytes, POISON)
        target = torch.empty_like(source)
        with self.queue():
            return nbytes / self.seconds(lambda: target.copy_(source)) / 1e9


def options_of(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """The flags of every part: the benchmarks' own, `--device` and `--only`."""
    root = parser(description)
    root.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    root.add_argument("--only", default="", metavar="NAME", help="these kernels only")
    return root.parse_args(arguments)


def note_gpu(result: Result) -> None:
    """Name, driver, CUDA and the packages that matter, into a result."""
    for package in ("triton", "cupy-cuda12x", "cupy-cuda13x"):
        try:
            result.versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not all are anywhere
    tool = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if tool is None:
        return
    try:
        done = subprocess.run(
            [tool, *query], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"nvidia-smi: {error}")
        return
    if done.returncode == 0 and done.stdout.strip():
        name, driver, memory = (part.strip() for part in done.stdout.splitlines()[0].split(","))
        result.machine["gpu"] = f"{name}, {memory}"
        result.versions["driver"] = driver
