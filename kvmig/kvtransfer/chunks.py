"""How many blocks the next copy may take, so that none lasts longer than a bounded time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvmig.ground.errors import ConfigError

WEIGHT = 0.25
"""Of a new measurement in the average rate."""


class ChunkSizer:
    """Learns the rate of copies and sizes the next one by it.

    block_bytes: bytes of one fused block; chunk_bytes: a staging slot's;
    chunk_ms: the longest time that a copy should take.
    """

    def __init__(self, block_bytes: int, chunk_bytes: int, chunk_ms: float) -> None:
        """Raises ConfigError if a slot can't hold one block."""
        if block_bytes > chunk_bytes:
            raise ConfigError(
                f"--chunk-bytes is {chunk_bytes}, but one KV block of this model is {block_bytes}"
            )
        self._block_bytes = block_bytes
        self._most = chunk_bytes // block_bytes
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
