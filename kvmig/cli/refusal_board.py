"""What the launcher and the scheduler have refused: front ends show it."""

from __future__ import annotations

from kvmig.controlplane.messages import MessagesRefused
from kvmig.kvtransfer.wire import RefusalCounter


class RefusalBoard:
    """own: the launcher's, counted over all its sockets. scheduler: as it told last, by reason."""

    def __init__(self) -> None:
        self.own = RefusalCounter()
        self.scheduler: dict[str, int] = {}

    def told(self) -> list[MessagesRefused]:
        """One a process."""
        return [
            MessagesRefused("launcher", self.own.counts()),
            MessagesRefused("scheduler", self.scheduler),
        ]
