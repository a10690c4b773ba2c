"""GB/s between the GPU and pinned memory of the host: large copies both ways, and blocks gathered
straight into the host's memory and scattered from it, by few CTAs and by the copy engines. Last,
the vLLM adapter's copies to each kind of buffer."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from bench.gpu.adapter import adapter
from bench.gpu.device import Deadline, Site, Way, note_gpu, options_of
from bench.gpu.shapes import SHAPES, Shape, ids
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError
from kvmig.kernels.api import BlockCopy

WORKERS = (1, 2, 4, 8, 16, 32)
MIB = 1 << 20
MAPPED = ("mapping", "shm")
"""The adapter's buffers of the host that the GPU reaches by itself."""
HOST_GB_S = 45.0
"""What they should reach on PCIe 5 x16."""
MOST_S = 25.0


def host_memory(site: Site, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8, pinned where there is a GPU to pin it for."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=site.device == "cuda")


def copies(site: Site, nbytes: int, result: Result) -> None:
    """One large copy each way."""
    here, there = host_memory(site, nbytes), site.memory(nbytes)
    with site.queue():
        to_host = site.seconds(lambda: here.copy_(there, non_blocking=True))
        to_device = site.seconds(lambda: there.copy_(here, non_blocking=True))
    result.summary["device_to_host_gb_s"] = nbytes / to_host / 1e9
    result.summary["host_to_device_gb_s"] = nbytes / to_device / 1e9


def gathers(site: Site, way: Way, shape: Shape, nbytes: int, result: Result) -> None:
    """Blocks at random to the host and back, for every number of CTAs."""
    blocks = shape.blocks(nbytes)
    pool, host = site.memory(blocks * shape.block_bytes), host_memory(site, nbytes)
    n = min(blocks, shape.blocks(nbytes) // 2) or 1
    paged = shape.layout(pool.data_ptr(), blocks).regions
    staged = shape.staged(host.data_ptr())
    chosen, places = ids("random", n, blocks), ids("contiguous", n, n)
    for workers in WORKERS if way.capped else (0,):
        sample = {"way": way.name, "shape": shape.name, "workers": workers}
        to_host = partial(way.copy, BlockCopy(paged, staged, chosen, places))
        back = partial(way.copy, BlockCopy(staged, paged, places, chosen))
        how: dict[str, Any] = {"checksums": False, "stream": site.stream, "workers": workers}
        try:
            for name, copy in (("to_host_gb_s", to_host), ("from_host_gb_s", back)):
                seconds = site.seconds(partial(copy, **how), repeats=3)
                result.samples.append({**sample, name: n * shape.block_bytes / seconds / 1e9})
        except (KvmigError, RuntimeError, ValueError) as error:
            result.samples.append({**sample, "wrong": f"{type(error).__name__}: {error}"})
            say(f"{way.name} to the host: {error}")


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    nbytes = (8 if options.quick else 256) * MIB
    result = begin("gpu links", {"bytes": nbytes})
    note_gpu(result)
    site = Site(options.device, options.only)
    copies(site, nbytes, result)
    deadline = Deadline(MOST_S)
    for way in site.ways():
        if deadline.over(result):
            break
        gathers(site, way, SHAPES[1], nbytes, result)
    if not deadline.over(result):
        try:
            adapter(site, SHAPES[1], nbytes, result)
        except (KvmigError, RuntimeError, ValueError) as error:
            result.samples.append({"way": "adapter", "wrong": f"{type(error).__name__}: {error}"})
            say(f"the adapter: {error}")
    ours = [sample for sample in result.samples if "buffer" in sample]
    for name in ("gather_gb_s", "scatter_gb_s"):
        slowest = min((float(sample[name]) for sample in ours), default=0.0)
        result.summary[f"adapter_{name}_least"] = slowest
        mapped = [float(sample[name]) for sample in ours if sample["buffer"] in MAPPED]
        result.summary[f"adapter_host_{name}"] = min(mapped, default=0.0)
        if site.device == "cuda":
            result.targets[f"adapter_host_{name}"] = {"min": HOST_GB_S}
    for name in ("to_host_gb_s", "from_host_gb_s"):
        best = [float(sample[name]) for sample in result.samples if name in sample]
        result.summary[f"gather_{name}"] = max(best, default=0.0)
    rows = [tuple(sample.values()) for sample in result.samples if "to_host_gb_s" in sample]
    columns = ("way", "shape", "CTAs", "GB/s to the host")
    tables = [table("gathers into pinned memory", columns, rows)]
    columns = ("shape", "buffer", "GB/s gathered", "GB/s scattered")
    rows = [tuple(sample.values())[1:] for sample in ours]
    tables.append(table("the vLLM adapter's copies", columns, rows))
    return finish(result, options, tables)


if __name__ == "__main__":
    sys.exit(main())
