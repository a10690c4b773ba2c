"""The one pool of KV blocks of an engine, and who holds which; on the engine's thread."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState as State

from kvmig.ground.errors import MigrationRefused
from kvmig.ground.layout import KVLayout, Region


class Blocks:
    """transformers' paged cache with one group of layers; a block is one run of bytes in it."""

    def __init__(self, cache: Any, model_words: str, weights: str) -> None:
        """model_words: of the model, what must agree for blocks to be exchanged beside `weights`,
        which is the identity of these.
        """
        self._cache = cache
        ((self._name, self._allocator),) = cache.cache_allocators.items()
        allocator = self._allocator
        self.tokens: int = allocator.tokens_per_page
        self.total: int = allocator.num_blocks
        stride: int = allocator.bytes_per_block
        words = f"{model_words}\0{cache.dtype}\0{allocator.num_key_value_heads}"
        # Ids count from the tensor's start, where blocks that nobody gets are.
        self.layout = KVLayout(
            (Region(cache.cache_tensor.data_ptr(), stride, stride),),
            cache.cache_tensor.numel() // stride,
            self.tokens,
            hashlib.blake2b(words.encode(), digest_size=16).hexdigest(),
            weights=weights,
        )

    def needed(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.tokens)

    def free_now(self) -> int:
        """Blocks that a request can have, those included that keep a prefix for nobody."""
        allocator, pool = self._allocator, self._cache.pool
        return int(
            pool.num_free_sectors * allocator.blocks_per_sector
            + pool.count_free_blocks(allocator.index)
            + len(allocator.ledger.cached_blocks)
        )

    def of(self, request_id: str) -> list[int]:
        """The request's block ids, in order."""
        return list(self._allocator.block_table.get(request_id, ()))

    def share_prefix(self, request_id: str, tokens: list[int]) -> int:
        """Give a new request the blocks that hold its prefix already; how many."""
        matched: int = self._cache.search_prefix_match(request_id, tokens)
        return matched // self.tokens

    def hold(self, request_id: str, num_tokens: int) -> None:
        """Let the request have room for so many tokens.

        Raises MigrationRefused ("no_blocks"), and leaves it what it had.
        """
        state = State(request_id=request_id, initial_tokens=[])
        cache = self._cache
        if cache.can_store_request_tokens(state, num_tokens):
            return
        # As the stock scheduler does when it runs short.
        if cache.evict_cached_blocks():
            cache.pool.try_to_free_sectors()
            if cache.can_store_request_tokens(state, num_tokens):
                return
        raise MigrationRefused("no_blocks", f"no room for {num_tokens} tokens")

    def computed(self, state: State) -> None:
        """The request's blocks came full up to its position: others may share them."""
        full = state.current_len() // self.tokens
        hashed = self._allocator.ledger.block_to_hash
        new = sum(block not in hashed for block in self.of(state.request_id)[:full])
        if new and self._cache.use_prefix_sharing:
            self._cache.mark_complete_blocks(state, {self._name: new})

    def free(self, request_id: str) -> None:
        """Give back all that it holds; unknown ids are ignored."""
        self._cache.free_blocks(request_id)
