"""What a worker of vLLM's on a CPU does in tests for its KV cache to count as a GPU's."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvmig.engines.vllm import allocation, device_sharing, memory
from kvmig.engines.vllm import worker as real
from kvmig.engines.vllm.serving import ServingVllm
from kvmig.engines.vllm.subblocks import RankCache
from kvmig.kernels import driver, ipc
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange
from tests.support import fake_gpu


def count_as_gpus(patch: pytest.MonkeyPatch, gpu: CudaDriver) -> int:
    """The caches of engines that are made from now on lie on that GPU, where their steps have a
    stream, which this gives. Who puts them there is somebody else."""
    open_memory, steps = ServingVllm._open, gpu.new_stream()

    def open_on_gpu(engine: ServingVllm, *arguments: Any) -> None:
        engine._core.vllm_config.device_config.device_type = "cuda"
        open_memory(engine, *arguments)

    on_gpu = SimpleNamespace(
        current_device=lambda: gpu.ordinal,
        current_stream=lambda device: SimpleNamespace(cuda_stream=steps),
    )
    patch.setattr(memory, "torch", SimpleNamespace(cuda=on_gpu))
    patch.setattr(ServingVllm, "_open", open_on_gpu)
    return steps


class Hosted(AddressRange):
    """Behind which the CPU may compute, too."""

    def map_pages(self, pages: Sequence[int]) -> None:
        super().map_pages(pages)
        for page in pages:
            fake_gpu.library().fakegpu_host(ctypes.c_void_p(page))


def take_pages_of_gpus(patch: pytest.MonkeyPatch) -> None:
    """Engines of a unit that are made from now on take a GPU's pages for their caches.

    While they start, something is written to all of these, as vLLM's warm-up does on GPUs.
    """

    def tensor_at(addresses: AddressRange, nbytes: int) -> torch.Tensor:
        whole = (ctypes.c_int8 * nbytes).from_address(addresses.address)
        made = torch.frombuffer(whole, dtype=torch.int8)
        made[:: addresses.page] = 1
        made[-1] = 1
        return made

    without_pages = allocation.without_pages
    patch.setattr(allocation, "AddressRange", Hosted)
    patch.setattr(allocation, "tensor_at", tensor_at)
    patch.setattr(device_sharing, "without_pages", lambda device: without_pages("cuda"))


def memory_of(gpu: CudaDriver) -> Callable[[int], torch.UntypedStorage]:
    """Makes memory of a GPU of the tests' own in which the CPU may compute, too."""

    def on_gpu(nbytes: int) -> torch.UntypedStorage:
        address = gpu.allocate(nbytes)
        ctypes.CDLL(driver.LIBRARY).fakegpu_host(ctypes.c_void_p(address))
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8).zero_().untyped_storage()

    return on_gpu


def export_cache(
    worker: Any, layer_names: Sequence[str], library: str
) -> tuple[RankCache, ipc.SharedAllocation]:
    """In the place of `kvmig.engines.vllm.worker.export_cache`: the cache, still unused, moves to
    its rank's GPU of the tests' own.

    library: this process's copy of it, for the other one has begun it before the fork.
    """
    driver.LIBRARY = library
    driver._initialised.cache_clear()
    real.move_cache(worker, layer_names, memory_of(CudaDriver(worker.rank)))
    worker.device = torch.device("cuda", worker.rank)
    try:
        return real.export_cache(worker, layer_names)
    finally:
        worker.device = torch.device("cpu")
