"""transformers' paged cache of one model, in a pool's memory instead of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvmig.engines.transformers.headwise import HeadShare, HeadwiseAllocator
from kvmig.engines.transformers.pool import PoolShare, SharedPool


class PooledCache(PagedAttentionCache):
    """Asks the pool's other engines, too, when it runs short."""

    def __init__(self, pool: SharedPool, floor_blocks: int, **stock: Any) -> None:
        """stock: as transformers makes it; of its own tensor there is one block, and that goes."""
        config = replace(stock["continuous_batching_config"], num_blocks=1)
        super().__init__(**stock | {"continuous_batching_config": config})
        ((name, allocator),) = self.cache_allocators.items()
        if pool.cut == "head-wise":
            allocator = HeadwiseAllocator(
                index=0,
                config=self.config,
                num_key_value_heads=allocator.num_key_value_heads,
                cache_dtype=self.dtype,
                page_size=allocator.tokens_per_page,
                layer_indices=allocator.layer_indices,
                allow_block_sharing=allocator.use_block_sharing,
            )
            self.cache_allocators[name] = allocator
            self.layer_to_allocator = dict.fromkeys(allocator.layer_indices, allocator)
            units = allocator.num_key_value_heads * len(allocator.layer_indices)
            self.pool: PoolShare = HeadShare(pool, self, floor_blocks, units)
            self.bytes_per_sector = allocator.bytes_per_block
        else:
            self.pool = PoolShare(pool, self, floor_blocks, pool.num_units)
            self.bytes_per_sector = pool.unit_bytes
        self.cache_tensor, self.num_sectors = pool.tensor, self.pool.num_sectors
        size = self.num_sectors * self.bytes_per_sector
        allocator.register_cache_tensor(self.bytes_per_sector, size, pool.tensor, self.pool)
        self.tokens_per_sector = allocator.blocks_per_sector * allocator.tokens_per_page
        self.num_blocks = allocator.num_blocks
        self.max_tokens_read = allocator.num_blocks * allocator.tokens_per_page

    def evict_cached_blocks(self) -> bool:
        """Drop cached prefixes, its own and the others'; whether that made room."""
        before = self.pool.pool.free_units()
        evicted = super().evict_cached_blocks()
        for one in self.pool.others:
            PagedAttentionCache.evict_cached_blocks(one.cache)
        self.pool.try_to_free_sectors()
        return evicted or self.pool.pool.free_units() > before

    def reset(self) -> None:
        """Free its own requests and cached prefixes only."""
        self.free_all_requests()
        PagedAttentionCache.evict_cached_blocks(self)
        self.pool.give_back()
