"""What a worker of vLLM's on a CPU does in tests for its KV cache to count as a GPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvmig.engines.vllm import worker as real
from kvmig.engines.vllm.units import RankCache
from kvmig.kernels import driver, ipc
from kvmig.kernels.driver import Driver


def memory_of(gpu: Driver) -> Callable[[int], torch.UntypedStorage]:
    """Makes memory of a GPU of the tests' own in which the CPU may compute, too."""

    def on_gpu(nbytes: int) -> torch.UntypedStorage:
        address = gpu.allocate(nbytes)
        ctypes.CDLL(driver.LIBRARY).fakegpu_host(ctypes.c_void_p(address))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_().untyped_storage()

    return on_gpu


def export_cache(
    worker: Any, layer_names: Sequence[str], library: str
) -> tuple[RankCache, ipc.Allocation]:
    """In the place of `kvmig.engines.vllm.worker.export_cache`: the cache, still unused, moves to
    its rank's GPU of the tests' own.

    library: this process's copy of it, for the other one has begun it before the fork.
    """
    driver.LIBRARY = library
    driver._initialised.cache_clear()
    real.move_cache(worker, layer_names, memory_of(Driver(worker.rank)))
    worker.device = torch.device("cuda", worker.rank)
    try:
        return real.export_cache(worker, layer_names)
    finally:
        worker.device = torch.device("cpu")
