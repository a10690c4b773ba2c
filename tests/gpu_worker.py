"""What a worker of vLLM's on a CPU does in tests for its KV cache to count as a GPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kvmig.engines.vllm import worker as real
from kvmig.engines.vllm.units import RankCache
from kvmig.kernels import driver, ipc
from kvmig.kernels.driver import Driver


def export_cache(
    worker: Any, layer_names: Sequence[str], library: str
) -> tuple[RankCache, ipc.Allocation]:
    """In the place of `kvmig.engines.vllm.worker.export_cache`: the cache, still unused, moves to
    its rank's GPU of the tests' own, in which the CPU may compute, too.

    library: this process's copy of it, for the other one has begun it before the fork.
    """
    driver.LIBRARY = library
    driver._initialised.cache_clear()
    gpu = Driver(worker.rank)

    def on_gpu(nbytes: int) -> torch.UntypedStorage:
        address = gpu.allocate(nbytes)
        ctypes.CDLL(library).fakegpu_host(ctypes.c_void_p(address))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_().untyped_storage()

    real.move_cache(worker, layer_names, on_gpu)
    worker.device = torch.device("cuda", worker.rank)
    try:
        return real.export_cache(worker, layer_names)
    finally:
        worker.device = torch.device("cpu")
