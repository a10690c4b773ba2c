"""Copies of KV blocks between a GPU and the host, on a stream of their own, through torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from vllm.config import VllmConfig

from kvmig.ground.layout import KVLayout, Region
from kvmig.kernels.copy import checksum_fused


class DeviceCopies:
    """Through pinned memory. `tensors`: one a region of `layout`, each [blocks, ...]."""

    def __init__(self, layout: KVLayout, tensors: Sequence[torch.Tensor]) -> None:
        self._layout = layout
        self._rows = [
            _rows(tensor, region, layout.num_blocks)
            for tensor, region in zip(tensors, layout.regions, strict=True)
        ]
        self._device = tensors[0].device
        self._stream = torch.cuda.Stream()

    def gather(self, ids: Sequence[int], out: memoryview) -> list[int]:
        with torch.cuda.stream(self._stream):
            chosen = torch.tensor(list(ids), device=self._device)
            parts = [rows[chosen] for rows in self._rows]
            packed = torch.cat(parts, dim=1).to("cpu", non_blocking=False)
        torch.frombuffer(out, dtype=torch.uint8).copy_(packed.flatten())
        return checksum_fused(out, self._layout.block_bytes)

    def scatter(self, ids: Sequence[int], data: memoryview) -> list[int]:
        sums = checksum_fused(data, self._layout.block_bytes)
        host = torch.empty((len(ids), self._layout.block_bytes), dtype=torch.uint8).pin_memory()
        host.numpy().reshape(-1)[:] = numpy.frombuffer(data, dtype=numpy.uint8)
        with torch.cuda.stream(self._stream):
            chosen = torch.tensor(list(ids), device=self._device)
            packed = host.to(self._device, non_blocking=True)
            offset = 0
            for rows in self._rows:
                width = rows.shape[1]
                rows[chosen] = packed[:, offset : offset + width]
                offset += width
            self._stream.synchronize()
        return sums


def layer_tensors(config: VllmConfig, layer_names: Sequence[str]) -> list[torch.Tensor]:
    """The KV caches of this process's own worker; layers that share memory only once."""
    context = config.compilation_config.static_forward_context
    tensors = (context[name].kv_cache for name in layer_names)
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


def _rows(tensor: torch.Tensor, region: Region, num_blocks: int) -> torch.Tensor:
    """The tensor's memory as bytes [blocks, run], whatever its order of dimensions."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = torch.as_strided(tensor, (size,), (1,), 0).view(torch.uint8)
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return torch.as_strided(flat, (num_blocks, region.run), (region.block_stride, 1), offset)
