"""What a front end makes of `Resolve` and of the destination's answer to Fence. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvmig.controlplane.messages import Resolve
from kvmig.gateway.requests import RequestTable


class Verdicts:
    """Whether the destination runs the request; once said, it stays so."""

    def __init__(self, table: RequestTable, discard: Callable[[Resolve], None]) -> None:
        """discard: tells the destination to drop what it has of the question's epoch."""
        self._table = table
        self._discard = discard

    def known(self, question: Resolve) -> bool | None:
        """The answer, if the destination needn't be asked."""
        entry = self._table.runs.get(question.request_id)
        if entry is None:
            # It ended, or runs again elsewhere: neither side shall keep it. The source frees
            # it on `moved`.
            self._discard(question)
            return True
        if entry.splicer.fenced(question.epoch):
            return False
        return True if entry.splicer.reached(question.epoch) else None

    def after(self, question: Resolve, committed: bool) -> bool:
        """The answer, now that the destination has said, or can't say, that it committed."""
        entry = self._table.runs.get(question.request_id)
        if entry is None:
            self._discard(question)
            return True
        if committed:
            entry.splicer.grant(question.epoch)
            entry.inherit(question.destination, question.epoch - 1)
            return True
        if not entry.splicer.fence(question.epoch):
            return True  # its tokens came while we asked
        self._discard(question)
        return False
