"""What the migrations out of one instance have measured, for those that come after them."""

from __future__ import annotations

from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.meeting import LeadTime
from kvmig.kvtransfer.pause_cost import CopyTimes
from kvmig.kvtransfer.spread import PauseTime
from kvmig.kvtransfer.stages import TAIL_BLOCKS


class Experience:
    """Copy rates, and how long messages and threads take in the pause."""

    def __init__(self, sizer: ChunkSizer) -> None:
        self.sizer = sizer
        self.lead = LeadTime()
        self.pause = PauseTime()
        self.tails = CopyTimes()

    def tail_ms(self, block_bytes: int) -> float | None:
        """What the copy of a tail costs that is as long as tails may be: so many full blocks
        and one that isn't full. None until anything was copied."""
        nbytes = (TAIL_BLOCKS + 1) * block_bytes
        return self.tails.expected(nbytes, self.sizer.bytes_per_ms)
