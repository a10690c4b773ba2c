"""Loads or builds the kernels, and measures what nothing on this GPU can be faster than."""

from __future__ import annotations

import sys
import time

import torch

from bench.gpu.device import Site, note_gpu, options_of
from bench.report import Result, begin, finish
from kvmig.core.errors import KvmigError
from kvmig.kernels import select
from kvmig.kernels.driver import CudaDriver

GIB = 1 << 30


def load(site: Site, result: Result) -> None:
    """Seconds until each kind of kernels can be used: that is where nvcc or NVRTC runs."""
    for name in select.ORDER[site.device][:-1]:
        start = time.monotonic()
        try:
            select.load(name, site.device)
        except KvmigError as error:
            result.samples.append({"kernels": name, "reason": str(error)})
            continue
        seconds = round(time.monotonic() - start, 2)
        result.summary[f"{name}_load_s"] = seconds
        result.samples.append({"kernels": name, "seconds": seconds})


def matmul_tflops(site: Site, size: int) -> float:
    """Of a square product in bf16, with random numbers."""
    a, b = (torch.randn(size, size, device=site.device).bfloat16() for _ in range(2))
    with site.queue():
        return 2 * size**3 / site.seconds(lambda: a @ b) / 1e12


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    nbytes, size = (GIB // 64, 256) if options.quick else (4 * GIB, 8192)
    result = begin("gpu ceilings", {"copy_bytes": nbytes, "matmul_size": size})
    note_gpu(result)
    site = Site(options.device)
    load(site, result)
    result.summary["device_copy_gb_s"] = site.copy_ceiling(nbytes)
    result.summary["bf16_matmul_tflops"] = matmul_tflops(site, size)
    if site.device == "cuda":
        lowest, highest = CudaDriver().stream_priorities()
        result.summary["lowest_stream_priority"] = lowest
        result.summary["highest_stream_priority"] = highest
    return finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
