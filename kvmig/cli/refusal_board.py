"""What the launcher and the scheduler have refused: front ends show it."""

from __future__ import annotations

from kvmig.controlplane.messages import MessagesRefused
from kvmig.kvtransfer.wire import Refusals


class RefusalBoard:
    """own: the launcher's, counted over all its sockets. scheduler: as it told last, by reason."""

    def __init__(self) -> None:
        self.own = Refusals()
        self.scheduler: dict[str, int] = {}

    def told(self) -> list[MessagesRefused]:
        """One a process."""
        return [
            MessagesRefused("launcher", self.own.told()),
            MessagesRefused("scheduler", self.scheduler),
        ]
