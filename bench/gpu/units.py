"""What it costs that a unit's KV cache comes and goes: microseconds to take a page (2 MiB of a GPU,
4 KiB of a host) and to give it back, and seconds to have one page behind all addresses while an
engine starts. Each page that comes is zeros, and keeps what is written until it goes.

Then what a part of the SMs costs a step (`sm_shares`)."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

from bench.gpu.device import Site, note_gpu, options_of
from bench.gpu.sm_shares import measure as measure_step
from bench.gpu.sm_shares import on_shares
from bench.report import Result, begin, finish
from kvmig.core.layout import BlockRegion
from kvmig.engines.backing import CacheBacking, MadviseBacking, VmmBacking
from kvmig.engines.gate import PARTS
from kvmig.kernels.copy import address_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange, page_bytes

LAYERS, ROUNDS = 16, 5
"""As many pages come and go at once as a group of blocks has layers."""
GIB = 1 << 30


def regions(base: int, page: int, groups: int) -> list[BlockRegion]:
    """Of blocks that fill a page each."""
    return [BlockRegion(base + layer * groups * page, page, page) for layer in range(LAYERS)]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(
    result: Result, backing: CacheBacking, groups: int, touch: Callable[[int], bytes]
) -> None:
    """touch: write to a group, and what was there before."""
    taken: list[float] = []
    given: list[float] = []
    wrong = 0
    for _ in range(ROUNDS):
        for group in range(groups):
            taken.append(seconds(partial(backing.take_pages, [group])))
            wrong += any(touch(group)) + (not any(touch(group)))
        given += [seconds(partial(backing.give_pages, [group])) for group in range(groups)]
    for name, times in (("take", taken), ("give", given)):
        ordered = sorted(one / LAYERS * 1e6 for one in times)
        result.summary[f"{name}_us_a_page_p50"] = ordered[len(ordered) // 2]
        result.summary[f"{name}_us_a_page_p99"] = ordered[len(ordered) * 99 // 100]
        result.samples.append({"what": name, "us_a_page": [round(one, 2) for one in ordered]})
    result.summary["wrong"] = wrong
    result.targets["wrong"] = {"max": 0}


def on_gpu(result: Result, groups: int, start_bytes: int) -> None:
    """start_bytes: of addresses that an engine starts with."""
    gpu = CudaDriver()
    page = page_bytes(gpu)
    with closing(AddressRange(gpu, start_bytes)) as addresses:
        result.summary["cover_s"] = seconds(addresses.cover)
        result.summary["uncover_s"] = seconds(lambda: addresses.drop(addresses.pages))
    with closing(AddressRange(gpu, LAYERS * groups * page)) as addresses:

        def touch(group: int) -> bytes:
            at = addresses.address + group * page
            before = gpu.read(at, page)
            gpu.write(at, b"\xff")
            return before

        backing = VmmBacking(addresses, regions(addresses.address, page, groups), groups)
        measure(result, backing, groups, touch)


def on_host(result: Result, groups: int) -> None:
    page = mmap.PAGESIZE
    with closing(mmap.mmap(-1, LAYERS * groups * page, flags=mmap.MAP_PRIVATE)) as memory:

        def touch(group: int) -> bytes:
            before = memory[group * page : (group + 1) * page]
            for layer in range(LAYERS):
                memory[(layer * groups + group) * page] = 0xFF
            return before

        with memoryview(memory) as view:
            base = address_of(view)
        measure(result, MadviseBacking(regions(base, page, groups), groups), groups, touch)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    groups, start_bytes, width = (4, GIB // 16, 64) if options.quick else (40, 64 * GIB, 4096)
    settings: dict[str, Any] = {
        "layers": LAYERS, "groups": groups, "rounds": ROUNDS, "step_width": width
    }  # fmt: skip
    result = begin("gpu units", {**settings, "start_bytes": start_bytes})
    note_gpu(result)
    if options.device == "cpu":
        on_host(result, groups)
        measure_step(result, Site("cpu"), PARTS, width)
    else:
        on_gpu(result, groups, start_bytes)
        on_shares(result, width)
    return finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
