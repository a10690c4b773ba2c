"""vLLM's KV cache in memory of ours: addresses without pages, as many as the cache may become.

vLLM takes its cache by one `torch.zeros`, which writes all of it. While an engine is made, that one
call gets a mapping of the system's, which is all zeros too, and has a page only once it is written.

A GPU's pages don't come by themselves. There it gets addresses of the driver's, which have one page
behind all of them while the engine starts: vLLM warms up and captures graphs on blocks that it
chooses itself, and what it writes there is never read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker import utils

from kvmig.core.errors import StartupError
from kvmig.kernels import driver
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange, page_bytes

_NORESERVE = 0x4000
"""MAP_NORESERVE, which Python's mmap has from 3.13 on."""


class TorchWithoutCache:
    """The module torch, with another call that takes the cache."""

    def __init__(self, on_gpu: bool) -> None:
        self.times = 0
        self.addresses: AddressRange | None = None
        """Addresses of a cache on a GPU."""
        self._on_gpu = on_gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **how: Any) -> torch.Tensor:
        """`allocate_kv_cache` asks for bytes."""
        if how.get("dtype") is not torch.int8:
            return torch.zeros(*size, **how)
        self.times += 1
        (nbytes,) = size
        if not self._on_gpu:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
            return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.int8)
        self.addresses = AddressRange(CudaDriver(driver.current_device()), nbytes)
        self.addresses.cover()
        return tensor_at(self.addresses, nbytes)


@contextmanager
def without_pages(device: str) -> Iterator[TorchWithoutCache]:
    """An engine that is made meanwhile, in this process, has its KV cache there.

    device: "cpu" or "cuda". Raises StartupError if vLLM takes it otherwise than expected.
    """
    on_gpu = device == "cuda"
    taken, get_configs = TorchWithoutCache(on_gpu), core.get_kv_cache_configs

    def whole_pages(
        config: VllmConfig, specs: list[dict[str, KVCacheSpec]], *more: Any
    ) -> list[KVCacheConfig]:
        """Configurations of as many blocks as fill pages in each layer: others couldn't be given
        back."""
        configs = get_configs(config, specs, *more)
        page = page_bytes(CudaDriver(driver.current_device())) if on_gpu else mmap.PAGESIZE
        strides = {spec.page_size_bytes for one in specs for spec in one.values()}
        group = math.lcm(*(page // math.gcd(page, stride) for stride in strides))
        blocks = configs[0].num_blocks
        if blocks % group == 0 or blocks < group:
            return configs
        with patch.object(config.cache_config, "num_gpu_blocks_override", blocks // group * group):
            return get_configs(config, specs, *more)

    with patch.object(utils, "torch", taken), patch.object(
        core, "get_kv_cache_configs", whole_pages
    ):  # fmt: skip
        yield taken
    if taken.times != 1:
        raise StartupError(
            f"vLLM takes its KV cache by {taken.times} allocations of whole bytes, not by one:"
            " it can't be shared with other engines"
        )


def tensor_at(addresses: AddressRange, nbytes: int) -> torch.Tensor:
    """The first bytes there. Its address must have memory now, for torch asks whose it is."""
    # Not by vLLM's cumem allocator or a MemPool: those have one handle a tensor, all or nothing,
    # and DLPack takes a capsule made by hand. The array interface is an address, and no more.
    array = {
        "shape": (nbytes,),
        "typestr": "|i1",
        "data": (addresses.address, False),
        "version": 3,
    }
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array))
