"""A call whose use is counted, and how its usage record begins. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmig.accounts.usage import Status, UsageRecord
from kvmig.asgi.call import HttpCall


@dataclass(eq=False)
class MeteredCall:
    """One call, from its start to its last record."""

    seq: int
    began: float
    """Unix time."""
    ttft_ms: float | None = field(default=None, kw_only=True)
    failed: bool = field(default=False, kw_only=True)
    """Whether its answer broke off."""

    def begin_record(self, call: HttpCall, model: str, ended: float | None) -> UsageRecord:
        """The record without any count. ended: Unix time; None: the call still runs."""
        status: Status = "running"
        if ended is not None:
            whole = call.answered and not (self.failed or call.refused)
            status = "finished" if whole else "cut"
        return UsageRecord(
            seq=self.seq,
            call_id=call.call_id,
            account=call.account,
            model=model,
            began=self.began,
            ended=ended,
            ttft_ms=self.ttft_ms,
            status=status,
        )
