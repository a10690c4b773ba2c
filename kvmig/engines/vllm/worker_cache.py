"""What runs in vLLM's worker processes, sent there by `collective_rpc`.

Each function gets vLLM's worker first. With one worker it is this process's own.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from kvmig.engines.vllm.cache_shape import LayerCache, Page, RankCache, merged
from kvmig.ground.errors import UnsupportedLayout


def describe_cache(worker: Any, layer_names: Sequence[str]) -> RankCache:
    """Where this worker's KV cache lies; layers that share memory only once."""
    layers: dict[int, LayerCache] = {}
    for _, layer in _layers(worker, layer_names):
        cache = layer.kv_cache
        if not isinstance(cache, torch.Tensor) or cache.dim() != 4:
            continue
        size = cache.element_size()
        layers.setdefault(
            cache.data_ptr(),
            LayerCache(
                address=cache.data_ptr(),
                shape=tuple(cache.shape),
                strides=tuple(stride * size for stride in cache.stride()),
                itemsize=size,
                dtype=str(cache.dtype),
                attention=str(getattr(layer, "isa", "")),
            ),
        )
    storage = _storage(worker, layer_names)
    pages = _pages(worker.model_runner.kv_cache_config)
    return RankCache(storage.data_ptr(), storage.nbytes(), pages, tuple(layers.values()))


def _pages(config: KVCacheConfig) -> tuple[Page, ...]:
    """Of a block of any group. Raises UnsupportedLayout."""
    specs: dict[str, KVCacheSpec] = {}
    for group in config.kv_cache_groups:
        whole = group.kv_cache_spec
        uniform = isinstance(whole, UniformTypeKVCacheSpecs)
        specs |= whole.kv_cache_specs if uniform else dict.fromkeys(group.layer_names, whole)
    pages = []
    for tensor in config.kv_cache_tensors:
        if tensor.host_resident:
            raise UnsupportedLayout("part of the KV cache lies in the host's memory")
        for number, name in enumerate(tensor.layers):
            offset = tensor.offset + number * tensor.layer_stride
            pages.append(Page(offset, tensor.block_stride, specs[name].page_size_bytes))
    return merged(pages, config.num_blocks)


def share_cache(worker: Any, layer_names: Sequence[str], paths: Sequence[str]) -> RankCache:
    """Move this worker's KV cache, still unused, into the file `paths[rank]`; describe it there.

    Raises OSError if there isn't as much memory, UnsupportedLayout if somebody else in the
    worker holds the old one.
    """
    old = _storage(worker, layer_names)
    nbytes, path = old.nbytes(), paths[worker.rank]
    layers, held = _layers(worker, layer_names), worker.model_runner.kv_caches
    caches = [*(layer.kv_cache for _, layer in layers), *held]
    views = {id(view): view for cache in caches for view in _tensors(cache)}
    old.resize_(0)  # first: there may be no room for both
    with Path(path).open("r+b") as file:
        # Takes the memory now: otherwise a lack of it is a SIGBUS in a step.
        os.posix_fallocate(file.fileno(), 0, nbytes)
    new = torch.UntypedStorage.from_file(path, shared=True, nbytes=nbytes)
    assert isinstance(new, torch.UntypedStorage)
    moved = {key: _on(new, view) for key, view in views.items()}
    for _, layer in layers:
        layer.kv_cache = _replaced(layer.kv_cache, moved)
    held[:] = [_replaced(one, moved) for one in held]
    views.clear()
    caches.clear()
    left = sum(
        type(one) is torch.Tensor and one.untyped_storage()._cdata == old._cdata
        for one in gc.get_objects()
    )
    if left:
        raise UnsupportedLayout(f"{left} tensors of the worker still use the KV cache's old memory")
    return describe_cache(worker, layer_names)


def _layers(worker: Any, layer_names: Sequence[str]) -> list[tuple[str, Any]]:
    context = worker.vllm_config.compilation_config.static_forward_context
    return [(name, context[name]) for name in layer_names]


def _storage(worker: Any, layer_names: Sequence[str]) -> torch.UntypedStorage:
    """The one allocation that all layers are views of."""
    storages = [
        view.untyped_storage()
        for _, layer in _layers(worker, layer_names)
        for view in _tensors(layer.kv_cache)
    ]
    if len({storage.data_ptr() for storage in storages}) != 1:
        raise UnsupportedLayout("the KV cache lies in several allocations")
    return storages[0]


def _tensors(cache: Any) -> list[torch.Tensor]:
    """Of one layer: a tensor, or one for each part of a state."""
    return [cache] if isinstance(cache, torch.Tensor) else list(cache)


def _replaced(cache: Any, by_id: dict[int, torch.Tensor]) -> Any:
    if isinstance(cache, torch.Tensor):
        return by_id[id(cache)]
    return type(cache)(by_id[id(view)] for view in cache)


def _on(storage: torch.UntypedStorage, view: torch.Tensor) -> torch.Tensor:
    """The same view of other memory."""
    whole = torch.empty(0, dtype=view.dtype)
    return whole.set_(storage, view.storage_offset(), view.size(), view.stride())
