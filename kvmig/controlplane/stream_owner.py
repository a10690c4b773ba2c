"""What a llumlet has to say to the front end whose stream a request is."""

from __future__ import annotations

from collections.abc import Callable

from kvmig.controlplane.fronts import Fronts
from kvmig.controlplane.messages import PauseAhead, Resolve
from kvmig.controlplane.resolutions import Resolutions
from kvmig.controlplane.tracking import Tracking
from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.messages import Message


class StreamOwner:
    """send: to a front end; raises TransportError if it is gone."""

    def __init__(
        self,
        fronts: Fronts,
        tracking: Tracking,
        resolutions: Resolutions,
        send: Callable[[bytes, Message], None],
    ) -> None:
        self._fronts = fronts
        self._tracking = tracking
        self._resolutions = resolutions
        self._send = send

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """Ask who runs the request. Raises TransportError if its front end is gone."""
        question = Resolve(mid, request_id, epoch, destination)
        return await self._resolutions.ask(self._of(request_id), question)

    def foretell(self, request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        """Say that a pause comes, so that it can be spread; False if the front end is gone."""
        try:
            self._send(self._of(request_id), PauseAhead(request_id, pause_ms, stretch_ms))
        except TransportError:
            return False
        return True

    def _of(self, request_id: str) -> bytes:
        track = self._tracking.get(request_id)
        front = self._fronts.identity(track.gateway) if track else None
        if front is None:
            raise TransportError(f"the front end of {request_id} is gone")
        return front
