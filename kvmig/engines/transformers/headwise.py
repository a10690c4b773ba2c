"""Head-wise blocks: one head of one layer is what models of a pool take and give.

A block of a request is `layers * heads` units that lie anywhere, in a table of the engine's
`HeadShare`; to all else it is a block with one number. So a pool holds models of any numbers of
layers and heads and nothing is left over, as long as a unit is as many bytes for all. Each step
pays for it: every head of every token is looked up.

Between engines a block goes as the bytes of one whose layers lie together, token by token: so a
request moves between engines with head-wise blocks and others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_pool import RegularTrees

from kvmig.core.layout import BlockRegion
from kvmig.engines.block_copies import CopyPass
from kvmig.engines.transformers.pool import TRASH, PoolShare, SharedPool


class HeadShare(PoolShare):
    """One engine's blocks: a sector of transformers is one block, made of units that are free."""

    def __init__(self, pool: SharedPool, cache: Any, floor_blocks: int, units: int) -> None:
        """units: of a block."""
        self.units = units
        blocks = pool.num_units // units
        self._names = list(range(TRASH, blocks + TRASH))
        self.table = np.zeros((blocks + TRASH, units), np.int64)
        """Units [blocks, units of a block]; the first blocks are transformers' trash."""
        self.table[:TRASH] = np.arange(TRASH)[:, None]
        super().__init__(pool, cache, floor_blocks, blocks)

    def reset(self) -> None:
        """Begin again without a block."""
        self._free_blocks = [RegularTrees(1)]

    @property
    def free_sectors(self) -> Sequence[int]:
        """Sectors, as many as there are units for."""
        assert self.pool.heads is not None
        return range(self.pool.heads.free // self.units)

    def allocate_sector(self, index: int) -> None:
        """A block of its own, of free units."""
        assert self.pool.heads is not None
        units = self.pool.heads.take_units(self.units)
        name = self._names.pop()
        self.table[name] = units
        self._free_blocks[index].add_tree(name)

    def give_back(self) -> None:
        assert self.pool.heads is not None
        names = self._free_blocks[0].delete_full_trees()
        self.pool.heads.give_units(self.table[names].ravel())
        self._names += names

    def live(self) -> int:
        return len(self.live_blocks()) * self.units

    def floor(self) -> int:
        return self.floor_blocks * self.units

    def blocks_in(self, units: int) -> int:
        return units // self.units


class HeadwiseAllocator(FullAttentionCacheAllocator):
    """transformers' allocator of full attention, with other places of a token's keys and values.

    Indices that transformers makes are block * tokens + place; each layer looks its heads up.
    """

    supports_block_table = False

    def __init__(self, **stock: Any) -> None:
        super().__init__(**stock)
        self.block_physical_stride = self.tokens_per_page

    def register_cache_tensor(
        self,
        bytes_per_sector: int,
        non_trash_bytes: int,
        cache_tensor: torch.Tensor,
        pool: CachePool,
    ) -> None:
        """pool: a HeadShare; its units are rows of one head's keys or values of a token."""
        assert isinstance(pool, HeadShare)
        rows = cache_tensor.view(self.cache_dtype).view(-1, self.head_dim)
        self._keys, self._values = rows, rows[self.tokens_per_page :]
        self.share = pool
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, rows, pool)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        read_index: torch.Tensor,
        write_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this step's [tokens, heads, dim]; read all tokens', if any were there before."""
        shape = (-1, self.num_key_value_heads, self.head_dim)
        to = self._rows(write_index, layer_idx)
        self._keys.index_copy_(0, to, key_states.reshape(-1, self.head_dim))
        self._values.index_copy_(0, to, value_states.reshape(-1, self.head_dim))
        if read_index.numel() == 0:
            return key_states, value_states
        at = self._rows(read_index, layer_idx)
        keys = torch.index_select(self._keys, 0, at).view(shape)
        return keys, torch.index_select(self._values, 0, at).view(shape)

    def _rows(self, index: torch.Tensor, layer_idx: int) -> torch.Tensor:
        heads, by = self.num_key_value_heads, self.share.pool.heads
        assert by is not None
        first = self.layer_indices.index(layer_idx) * heads
        rows = by.rows(self.share.table, self.tokens_per_page, index.numpy(), first, heads)
        return torch.from_numpy(rows.reshape(-1))


class HeadPlan:
    """A `kvmig.engines.block_copies.CopyPlan`: copies by rows, in the order of whole blocks."""

    sums_by_copy = False

    def __init__(self, allocator: HeadwiseAllocator) -> None:
        self.unit_bytes: int = allocator.bytes_per_block
        self._share = share = allocator.share
        self._heads, self._tokens = allocator.num_key_value_heads, allocator.tokens_per_page
        size = allocator.head_dim * allocator.cache_dtype.itemsize
        self._row = BlockRegion(share.pool.tensor.data_ptr(), size, size)
        self._num_rows = share.pool.tensor.numel() // size

    def rows(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Rows of blocks [n]: of each layer keys, then values, token by token, head by head."""
        units = self._share.table[np.asarray(ids, np.int64)].reshape(
            len(ids), -1, 1, 1, self._heads
        )
        kinds = np.arange(2).reshape(2, 1, 1) * self._tokens
        return (units * (2 * self._tokens) + kinds + np.arange(self._tokens)[:, None]).ravel()

    def gather(self, ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """One copy of all rows."""
        rows = self.rows(ids)
        buffer = BlockRegion(address, self._row.run, self._row.run)
        places = np.arange(len(rows), dtype=np.int64)
        yield CopyPass((self._row,), (buffer,), rows, places, self._num_rows, len(rows))

    def scatter(self, ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """One copy of all rows."""
        for one in self.gather(ids, address):
            yield one.reversed()
