"""The engine's KV cache as regions, and copies of its blocks on a thread of their own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvmig.ground.errors import UnsupportedLayout
from kvmig.ground.layout import KVLayout, Region, fused
from kvmig.kernels.copy import address_of, backend, checksum_fused, copy_blocks

Copy = Callable[[list[int], memoryview], list[int]]


def kv_tensors(config: VllmConfig, scheduler: Scheduler) -> list[torch.Tensor]:
    """One tensor a layer, [kernel blocks, ...]; layers that share memory only once.

    Raises UnsupportedLayout for anything but one group of full attention.
    """
    kv_config = scheduler.kv_cache_config
    groups = kv_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedLayout(f"{len(groups)} KV cache groups; kvmig moves one")
    (group,) = groups
    if not isinstance(group.kv_cache_spec, FullAttentionSpec):
        kind = type(group.kv_cache_spec).__name__
        raise UnsupportedLayout(f"KV cache kind {kind}; kvmig moves full attention")
    context = config.compilation_config.static_forward_context
    tensors: dict[int, torch.Tensor] = {}
    for name in group.layer_names:
        tensor = context[name].kv_cache
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedLayout(f"layer {name} keeps its KV cache in {type(tensor).__name__}")
        tensors.setdefault(tensor.data_ptr(), tensor)
    return list(tensors.values())


def kv_layout(config: VllmConfig, scheduler: Scheduler) -> KVLayout:
    """Regions of the KV cache: one a layer, a scheduler block one run of bytes in it."""
    num_blocks = scheduler.kv_cache_config.num_blocks
    regions: list[Region] = []
    for tensor in kv_tensors(config, scheduler):
        kernel_blocks, rest = tensor.shape[0], tensor[0]
        if kernel_blocks % num_blocks:
            raise UnsupportedLayout(f"{kernel_blocks} kernel blocks for {num_blocks} blocks")
        per_block = kernel_blocks // num_blocks
        block_elements = rest.numel()
        if not _dense(rest) or (per_block > 1 and tensor.stride(0) != block_elements):
            order = config.cache_config.kv_cache_layout
            raise UnsupportedLayout(f"KV layout {order}: a layer's block is not one run of bytes")
        regions.append(
            Region(
                base=tensor.data_ptr(),
                block_stride=tensor.stride(0) * per_block * tensor.element_size(),
                run=block_elements * per_block * tensor.element_size(),
            )
        )
    model = config.model_config
    words = (
        str(config.cache_config.kv_cache_layout),
        str(tensor.dtype),
        str(tuple(tensor.shape[1:])),
        str(model.dtype),
        str(model.hf_config.to_json_string()),
        str(config.parallel_config.tensor_parallel_size),
    )
    return KVLayout(
        regions=tuple(regions),
        num_blocks=num_blocks,
        block_tokens=scheduler.block_size,
        model=hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest(),
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are one run, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class BlockMemory:
    """Gathers and scatters blocks of one engine's KV cache, one copy at a time.

    On a CPU the C++ kernel copies in place; on a GPU torch copies through pinned
    memory on a stream of its own.
    """

    def __init__(self, config: VllmConfig, scheduler: Scheduler) -> None:
        self.layout = kv_layout(config, scheduler)
        self._tensors = kv_tensors(config, scheduler)
        self._device = self._tensors[0].device
        backend()  # built now if it must be, not in somebody's first copy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvmig-copy")
        self._stream = torch.cuda.Stream() if self._device.type == "cuda" else None

    async def gather(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """Blocks [n] into `out`, fused; returns n checksums."""
        return await self._run(self._gather, block_ids, out)

    async def scatter(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """`data` [n * block_bytes] into blocks [n]; returns n checksums of `data`."""
        return await self._run(self._scatter, block_ids, data)

    def close(self) -> None:
        """Wait for the running copy and end the copy thread."""
        self._thread.shutdown(wait=True)

    async def _run(self, copy: Copy, block_ids: Sequence[int], buffer: memoryview) -> list[int]:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._thread, copy, list(block_ids), buffer)
        # A cancelled caller frees the blocks next: the copy must have left them first.
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise

    def _gather(self, block_ids: list[int], out: memoryview) -> list[int]:
        size = len(block_ids) * self.layout.block_bytes
        if self._stream is not None:
            self._device_gather(block_ids, out[:size])
            return checksum_fused(out[:size], self.layout.block_bytes)
        n = len(block_ids)
        target = fused(address_of(out[:size]), self.layout)
        return copy_blocks(
            self.layout.regions, target, block_ids, range(n), self.layout.num_blocks, n
        )

    def _scatter(self, block_ids: list[int], data: memoryview) -> list[int]:
        size = len(block_ids) * self.layout.block_bytes
        if self._stream is not None:
            sums = checksum_fused(data[:size], self.layout.block_bytes)
            self._device_scatter(block_ids, data[:size])
            return sums
        n = len(block_ids)
        source = fused(address_of(data[:size]), self.layout)
        return copy_blocks(
            source, self.layout.regions, range(n), block_ids, n, self.layout.num_blocks
        )

    def _device_gather(self, block_ids: list[int], out: memoryview) -> None:
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(block_ids, device=self._device)
            parts = [self._rows(tensor)[ids] for tensor in self._tensors]
            packed = torch.cat(parts, dim=1).to("cpu", non_blocking=False)
        torch.frombuffer(out, dtype=torch.uint8).copy_(packed.flatten())

    def _device_scatter(self, block_ids: list[int], data: memoryview) -> None:
        host = torch.empty(
            (len(block_ids), self.layout.block_bytes), dtype=torch.uint8
        ).pin_memory()
        host.numpy().reshape(-1)[:] = numpy.frombuffer(data, dtype=numpy.uint8)
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(block_ids, device=self._device)
            packed = host.to(self._device, non_blocking=True)
            offset = 0
            for tensor in self._tensors:
                rows = self._rows(tensor)
                width = rows.shape[1]
                rows[ids] = packed[:, offset : offset + width]
                offset += width
            assert self._stream is not None
            self._stream.synchronize()

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's memory as bytes [blocks, run], whatever its order of dimensions."""
        region = next(r for r in self.layout.regions if r.base == tensor.data_ptr())
        flat = torch.as_strided(
            tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
        ).view(torch.uint8)
        offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
        shape = (self.layout.num_blocks, region.run)
        return torch.as_strided(flat, shape, (region.block_stride, 1), offset)
