"""The toy's paged KV cache: blocks of tokens, keys in one region and values in another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvmig.engines.toy.model import HALF
from kvmig.ground.layout import KVLayout, Region


class Cache:
    """`num_blocks` blocks of `block_tokens` tokens, which requests have lists of."""

    def __init__(self, num_blocks: int, block_tokens: int, weights: str = "") -> None:
        """weights: identity of those that its content is computed with."""
        self.block_tokens = block_tokens
        self.free = list(range(num_blocks))
        # Axes: key or value, block, token.
        self._memory = np.zeros((2, num_blocks, block_tokens), np.uint64)
        run = block_tokens * HALF
        base = self._memory.ctypes.data
        self.layout = KVLayout(
            (Region(base, run, run), Region(base + num_blocks * run, run, run)),
            num_blocks,
            block_tokens,
            model="toy 2",
            weights=weights,
        )

    def needed(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_tokens)

    def take(self, blocks: list[int], num_tokens: int) -> bool:
        """Let `blocks` have room for so many tokens, if there is room."""
        more = self.needed(num_tokens) - len(blocks)
        if more > len(self.free):
            return False
        blocks += [self.free.pop(0) for _ in range(more)]
        return True

    def give_back(self, blocks: list[int]) -> None:
        """All of them."""
        self.free += blocks
        blocks.clear()

    def write(self, blocks: list[int], first: int, kv: NDArray[np.uint64]) -> None:
        """Keys and values [n, 2] of the tokens from `first` on."""
        places = np.arange(first, first + len(kv))
        block = np.array(blocks)[places // self.block_tokens]
        self._memory[:, block, places % self.block_tokens] = kv.T

    def read(self, blocks: list[int], tokens: int) -> NDArray[np.uint64]:
        """Keys and values [tokens, 2] of the first so many tokens."""
        used = blocks[: self.needed(tokens)]
        return self._memory[:, used].reshape(2, -1)[:, :tokens].T
