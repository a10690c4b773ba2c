"""Every kernel against the reference on the host: blocks at random in poisoned memory, runs and
gaps of all widths of access; all bytes are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.gpu.device import POISON, Deadline, Site, Way, note_gpu, options_of
from bench.report import begin, finish, say
from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.reference import ReferenceKernels

MOST_S = 48.0
GUARD = 4096
RUNS = (
    (64,), (48, 0, 16), (4096, 4096), (18432,) * 5, (65536 + 16, 30000), (1, 7, 63, 4095),
    (16,) * 70, (131072,), (40000,) * 3,
)  # fmt: skip
GAPS = (0, 16, 8, 4, 2, 1)
WORKERS = (0, 1, 3)
BLOCKS = 6


@dataclass(frozen=True, slots=True)
class Memory:
    """The same bytes on the device and on the host, where the reference works on them."""

    device: torch.Tensor
    host: torch.Tensor

    def differ(self) -> bool:
        return not torch.equal(self.device.cpu(), self.host)

    @property
    def shift(self) -> int:
        """From an address on the host to the same byte's on the device."""
        return self.device.data_ptr() - self.host.data_ptr()


def memory(site: Site, nbytes: int, poison: bool) -> Memory:
    """`nbytes` between guards."""
    whole = site.memory(nbytes + 2 * GUARD, POISON if poison else None)
    return Memory(whole, whole.cpu().clone())


def regions(place: Memory, runs: tuple[int, ...], gap: int) -> tuple[tuple[BlockRegion, ...], ...]:
    """On the device and on the host; a block's gap follows each run."""
    made: list[list[BlockRegion]] = []
    for start in (place.device.data_ptr(), place.host.data_ptr()):
        at = start + GUARD
        made.append([])
        for run in runs:
            made[-1].append(BlockRegion(at, run + gap, run))
            at += BLOCKS * (run + gap)
    return tuple(map(tuple, made))


def check_copy(site: Site, way: Way, runs: tuple[int, ...], gap: int, workers: int) -> str:
    """What is wrong, or nothing."""
    nbytes = sum(BLOCKS * (run + gap) for run in runs)
    source, target = memory(site, nbytes, poison=False), memory(site, nbytes, poison=True)
    (src, host_src), (dst, host_dst) = regions(source, runs, gap), regions(target, runs, gap)
    ids = [np.array(some, np.int64) for some in ([5, 0, 5, 3], [1, 0, 4, 2])]
    site.settle()
    sums = way.copy(
        BlockCopy(src, dst, *ids), checksums=way.summing, stream=site.stream, workers=workers
    ).wait()
    site.settle()
    on_host = BlockCopy(host_src, host_dst, *ids)
    wanted = ReferenceKernels("cpu").copy(on_host, checksums=way.summing).wait()
    return _compared(target, sums, wanted)


def _compared(target: Memory, sums: list[int], wanted: list[int]) -> str:
    wrong = ["bytes"] * target.differ() + ["checksums"] * (sums != wanted)
    return " and ".join(wrong)


Check = tuple[str, Callable[[], str]]
"""A name, and what says what is wrong."""


def copy_checks(site: Site, way: Way, quick: bool) -> Iterator[Check]:
    for runs in RUNS[:5] if quick else RUNS:
        for gap in GAPS[:3] if quick else GAPS:
            for workers in WORKERS[1:2] if quick else WORKERS:
                name = f"copy of {runs[0]} x {len(runs)}, gap {gap}, workers {workers}"
                yield name, partial(check_copy, site, way, runs, gap, workers)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    result = begin("gpu correctness", {"device": options.device, "quick": options.quick})
    note_gpu(result)
    site = Site(options.device, options.only)
    deadline = Deadline(MOST_S)
    for name, check in all_checks(site, options.quick):
        if deadline.over(result):
            break
        try:
            wrong = check()
        except KernelUnavailable:
            continue  # what the TMA doesn't take
        except (KvmigError, RuntimeError, ValueError, TimeoutError) as error:
            wrong = f"{type(error).__name__}: {error}"
        result.samples.append({"check": name, "wrong": wrong})
        if wrong:
            say(f"{name}: {wrong}")
    outcomes = [bool(sample["wrong"]) for sample in result.samples if "wrong" in sample]
    result.summary = {"checks": float(len(outcomes)), "wrong": float(sum(outcomes))}
    result.targets = {"wrong": {"max": 0}}
    return finish(result, options) or int(result.summary["wrong"] > 0)


def all_checks(site: Site, quick: bool) -> Iterator[Check]:
    """Of all kernels and ways to copy, by name; last of those that kvmig doesn't use."""
    for way in (*site.ways(), *site.variants()):
        for name, check in copy_checks(site, way, quick):
            yield f"{way.name}: {name}", check


if __name__ == "__main__":
    sys.exit(main())
