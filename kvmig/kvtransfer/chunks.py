"""How many blocks the next copy may take, so that none lasts longer than a bounded time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

WEIGHT = 0.25
"""Of a new measurement in the average rate."""


def slot_bytes(chunk_bytes: int, block_bytes: int) -> int:
    """Bytes of a staging slot: `chunk_bytes`, or one block of a model whose blocks are larger."""
    return max(chunk_bytes, block_bytes)


class ChunkSizer:
    """Learns the rate of copies and sizes the next one by it.

    block_bytes: bytes of one fused block; chunk_bytes: the configured size of a chunk;
    chunk_ms: the longest time that a copy of several blocks should take.
    """

    def __init__(self, block_bytes: int, chunk_bytes: int, chunk_ms: float) -> None:
        self._block_bytes = block_bytes
        # An engine whose requests don't move may have no blocks to speak of.
        self._most = slot_bytes(chunk_bytes, block_bytes) // max(block_bytes, 1)
        self._chunk_ms = chunk_ms
        self._rate: float | None = None

    def blocks(self) -> int:
        """Blocks of the next chunk: 1 until a copy was measured, never less, never over a slot."""
        if self._rate is None:
            return 1
        in_time = self._rate * self._chunk_ms / self._block_bytes
        return int(max(1, min(self._most, in_time)))

    @property
    def bytes_per_ms(self) -> float | None:
        """Of copies; None until one was measured."""
        return self._rate

    def observe(self, nbytes: int, ms: float) -> None:
        """A copy of `nbytes` took `ms` (one that took no time tells nothing)."""
        if nbytes <= 0 or ms <= 0:
            return
        rate = nbytes / ms
        self._rate = rate if self._rate is None else self._rate + WEIGHT * (rate - self._rate)


def cut(block_ids: Sequence[int], sizer: ChunkSizer) -> Iterator[tuple[int, Sequence[int]]]:
    """Chunks of `block_ids` as (position of the first, ids), each sized when it's asked for."""
    first = 0
    while first < len(block_ids):
        ids = block_ids[first : first + sizer.blocks()]
        yield first, ids
        first += len(ids)
