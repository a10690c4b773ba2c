"""What the migrations out of one instance have measured, for those that come after them."""

from __future__ import annotations

from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.meeting import LeadTime
from kvmig.kvtransfer.spread import PauseTime


class Experience:
    """Copy rates, and how long messages and threads take in the pause."""

    def __init__(self, sizer: ChunkSizer) -> None:
        self.sizer = sizer
        self.lead = LeadTime()
        self.pause = PauseTime()
