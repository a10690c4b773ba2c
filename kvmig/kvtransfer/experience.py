"""What the migrations out of one instance have measured, for those that come after them."""

from __future__ import annotations

from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.meeting import LeadTime
from kvmig.kvtransfer.pause_cost import CopyTimes, PauseCost, cheaper
from kvmig.kvtransfer.stages import TAIL_BLOCKS


class Experience:
    """Copy rates, and how long messages and threads take in the pause."""

    def __init__(self, sizer: ChunkSizer) -> None:
        self.sizer = sizer
        self.lead = LeadTime()
        self.tails = CopyTimes()

    def pause_cost(self, token_ms: float | None, block_bytes: int) -> PauseCost:
        """Of a tail as long as tails may be: so many full blocks and one that isn't full."""
        nbytes = (TAIL_BLOCKS + 1) * block_bytes
        return cheaper(self.tails.expected(nbytes, self.sizer.bytes_per_ms), token_ms)
