"""One memory for the KV caches of several models in a process: sectors that any engine takes.

A sector holds a whole number of each engine's blocks, so that any engine can have any of them.
Each engine has transformers' own `CachePool`, a `Share`, and the list of free sectors is one for
all. What an engine only keeps (sectors without blocks, cached prefixes), any other takes when it
runs short; what its requests hold stays theirs.

Progress: the pool is at least as large as one longest request of each engine together, the
engines' floors. An engine that is short below its floor keeps those above theirs from admitting
requests, until it has what it wants: so it waits for those that run, at longest.

Engines step on threads of their own. All that touches a share happens under `Pool.lock`; the
model's forward pass, which takes nearly all of a step, doesn't.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import ceil, lcm
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from kvmig.engines.transformers.config import EngineConfig
from kvmig.ground.errors import ConfigError

ALIGNMENT = 128
"""transformers aligns its sectors so."""
TRASH = 2
"""Sectors at the tensor's start that nobody gets: padding is read and written there."""


def block_bytes(config: EngineConfig, model_config: Any) -> int:
    """Bytes of one block of all layers; `model_config` is of the text model."""
    page: int = FullAttentionCacheAllocator.get_bytes_per_page(
        find_num_key_value_heads(model_config),
        find_head_dim(model_config),
        getattr(torch, config.dtype),
        config.block_tokens,
    )
    return page * int(model_config.num_hidden_layers)


class Pool:
    """The memory and its free sectors."""

    def __init__(self, num_bytes: int, engines: Mapping[str, tuple[EngineConfig, int]]) -> None:
        """engines: configuration and bytes of a block of each that will join, by name.

        Raises ConfigError for engines that can't share, or not in so few bytes.
        """
        if not engines:
            raise ConfigError("transformers pool: it has no engine, must have one or more")
        for field, why in (("dtype", "alike"), ("device", "the same")):
            values = {name: getattr(one, field) for name, (one, _) in engines.items()}
            if len(set(values.values())) > 1:
                raise ConfigError(f"transformers pool: {field} is {values}, must be {why} for all")
        if any(one.device != "cpu" for one, _ in engines.values()):
            raise ConfigError("transformers pool: device is 'cuda', must be cpu for now")
        self.sector_bytes = lcm(*(size for _, size in engines.values()), ALIGNMENT)
        self.num_sectors = num_bytes // self.sector_bytes
        floors = {
            name: ceil(one.num_blocks / (self.sector_bytes // size))
            for name, (one, size) in engines.items()
        }
        if sum(floors.values()) > self.num_sectors:
            least = sum(floors.values()) * self.sector_bytes
            raise ConfigError(
                f"transformers pool: {num_bytes} bytes are {self.num_sectors} sectors of"
                f" {self.sector_bytes}, but one longest request of each engine takes {floors}:"
                f" {least - num_bytes} bytes are missing"
            )
        self.tensor = torch.zeros((self.num_sectors + TRASH) * self.sector_bytes, dtype=torch.uint8)
        self.lock = threading.RLock()
        self.free_sectors = list(range(TRASH, self.num_sectors + TRASH))
        self.shares: list[Share] = []


class Share(CachePool):
    """One engine's blocks, in sectors of the pool."""

    def __init__(self, pool: Pool, cache: PagedAttentionCache, floor_blocks: int) -> None:
        """floor_blocks: what the engine's longest request takes."""
        super().__init__(pool.num_sectors, num_allocators=1)
        self.pool, self.cache = pool, cache
        self.floor_blocks = floor_blocks
        self.free_sectors = pool.free_sectors
        self.is_short: Callable[[], bool] = lambda: False
        """Whether its scheduler has requests that it has no room for; under the lock."""
        pool.shares.append(self)

    @property
    def others(self) -> list[Share]:
        """The pool's other engines."""
        return [one for one in self.pool.shares if one is not self]

    def live_blocks(self) -> set[int]:
        """Blocks that requests hold."""
        (allocator,) = self.cache.cache_allocators.values()
        return {block for held in allocator.block_table.values() for block in held}

    def live(self) -> int:
        """Sectors that no other engine can have: a request has a block in them."""
        per_sector = self.blocks_per_sector[0]
        return len({block // per_sector for block in self.live_blocks()})

    def floor(self) -> int:
        """Sectors that one longest request takes."""
        return ceil(self.floor_blocks / self.blocks_per_sector[0])

    def blocks_left(self) -> int:
        """Blocks that its requests could have now, if all engines gave what they only keep."""
        sectors = self.num_sectors - sum(one.live() for one in self.others)
        return sectors * self.blocks_per_sector[0] - len(self.live_blocks())

    def must_wait(self) -> bool:
        """Whether it has more than its floor while another is short of its own."""
        if not any(one.is_short() and one.live() < one.floor() for one in self.others):
            return False
        return self.live() > self.floor()

    def try_to_free_sectors(self) -> None:
        """Its sectors without a block become anybody's, and so do the others'."""
        for one in self.pool.shares:
            CachePool.try_to_free_sectors(one)

    def leave(self) -> None:
        """Give back everything, for good."""
        with self.pool.lock:
            if self in self.pool.shares:
                self.cache.reset()
                self.pool.shares.remove(self)


class PooledCache(PagedAttentionCache):
    """transformers' paged cache of one model, in a pool's memory."""

    def __init__(self, pool: Pool, floor_blocks: int, **stock: Any) -> None:
        """stock: as transformers makes it; its own tensor goes before anything has touched it."""
        super().__init__(**stock)
        (allocator,) = self.cache_allocators.values()
        self.bytes_per_sector, self.num_sectors = pool.sector_bytes, pool.num_sectors
        self.cache_tensor = pool.tensor
        self.pool = Share(pool, self, floor_blocks)
        size = pool.num_sectors * pool.sector_bytes
        allocator.register_cache_tensor(pool.sector_bytes, size, pool.tensor, self.pool)
        self.tokens_per_sector = allocator.blocks_per_sector * allocator.tokens_per_page
        self.num_blocks = allocator.num_blocks
        self.max_tokens_read = allocator.num_blocks * allocator.tokens_per_page

    def evict_cached_blocks(self) -> bool:
        """Its own cached prefixes, and the others'; whether that made room."""
        before = self.pool.num_free_sectors
        evicted = super().evict_cached_blocks()
        for one in self.pool.others:
            PagedAttentionCache.evict_cached_blocks(one.cache)
        self.pool.try_to_free_sectors()
        return evicted or self.pool.num_free_sectors > before

    def reset(self) -> None:
        """Its own blocks only."""
        self.free_all_requests()
        PagedAttentionCache.evict_cached_blocks(self)
        CachePool.try_to_free_sectors(self.pool)
