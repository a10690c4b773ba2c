"""What to copy next and when to stop: the pure arithmetic of live copying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

TAIL_BLOCKS = 1
"""So few full blocks left go with the tail: another stage would cost more than it saves."""


def enough(full_blocks: int, stage: int, max_stages: int) -> bool:
    """Whether to suspend now instead of copying `full_blocks` more in live stage `stage`.

    Example: stages of 100, 4 and 1 new full blocks: the first two are copied live, the
    last block goes with the tail.
    """
    return full_blocks <= TAIL_BLOCKS or stage >= max_stages


def chunks(
    first: int, block_ids: Sequence[int], size: Callable[[], int]
) -> Iterator[tuple[int, Sequence[int]]]:
    """Cut a stage into chunks of `size()` blocks, asked anew for each.

    Yields the index within the request of a chunk's first block, and its block ids.
    """
    start = 0
    while start < len(block_ids):
        stop = start + max(1, size())
        yield first + start, block_ids[start:stop]
        start = stop
