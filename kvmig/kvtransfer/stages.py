"""When live copying has done enough (what goes into one chunk: see `chunks`)."""

from __future__ import annotations

TAIL_BLOCKS = 1
"""So few full blocks left go with the tail: another stage would cost more than it saves."""


def enough(full_blocks: int, stage: int, max_stages: int) -> bool:
    """Whether to suspend now instead of copying `full_blocks` more in live stage `stage`.

    Example: stages of 100, 4 and 1 new full blocks: the first two are copied live, the
    last block goes with the tail. With `max_stages` 0 all blocks go with it.
    """
    return full_blocks <= TAIL_BLOCKS or stage >= max_stages
