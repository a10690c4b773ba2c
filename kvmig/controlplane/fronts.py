"""A llumlet's listeners (front ends, scheduler, launcher), and the front end of each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvmig.controlplane.messages import OutputSpan
from kvmig.core.errors import PeerError
from kvmig.engines.base import FIRST_GUEST, EmittedTokens

FORWARDED = 4096
"""Requests whose next place is remembered, so that a late abort finds them."""


class FrontendRegistry:
    """Front ends by name, socket identity and number; numbers are never reused.

    Those of the llumlet's own server are 1, 2, ..., those of other servers FIRST_GUEST and more.
    """

    def __init__(self) -> None:
        self._identity: dict[str, bytes] = {}
        self._name: dict[bytes, str] = {}
        self._number: dict[str, int] = {}
        self._listeners: set[bytes] = set()

    def join(self, name: str, identity: bytes, *, guest: bool = False) -> None:
        """A front end said hello, for the first time or again. guest: of another server."""
        self._identity[name] = identity
        self._name[identity] = name
        self._number.setdefault(name, len(self._number) + (FIRST_GUEST if guest else 1))

    def listen(self, identity: bytes) -> None:
        """A scheduler or the launcher said hello: it gets load reports."""
        self._listeners.add(identity)

    def leave(self, identity: bytes) -> str | None:
        """Forget this identity; returns the front end's name if it was one."""
        self._listeners.discard(identity)
        name = self._name.pop(identity, None)
        if name is not None:
            del self._identity[name]
        return name

    def name(self, identity: bytes) -> str:
        """The front end's name. Raises PeerError for others."""
        try:
            return self._name[identity]
        except KeyError:
            raise PeerError(f"{identity!r} is no front end") from None

    def number(self, identity: bytes) -> int:
        """The front end's number. Raises PeerError for others."""
        return self._number[self.name(identity)]

    def number_of(self, name: str) -> int | None:
        """The number of a front end that is connected now."""
        return self._number[name] if self.has(name) else None

    def has(self, name: str) -> bool:
        """Whether the front end is connected now."""
        return name in self._identity

    def is_gateway(self, identity: bytes) -> bool:
        """Whether a connected front end is behind this identity."""
        return identity in self._name

    def identity(self, name: str) -> bytes | None:
        """The identity of a front end, if it is connected now."""
        return self._identity.get(name)

    def client(self, number: int) -> bytes | None:
        """The identity of client `number`'s front end; 0 (statistics of no client): any front
        end of the llumlet's own server."""
        for name, identity in self._identity.items():
            known = self._number[name]
            if known == number or (number == 0 and known < FIRST_GUEST):
                return identity
        return None

    def gateways(self) -> list[bytes]:
        """The identities of all connected front ends."""
        return list(self._name)

    def listeners(self) -> list[bytes]:
        """The identities of scheduler and launcher, which get load reports as front ends do."""
        return list(self._listeners)


@dataclass(slots=True)
class RequestOwner:
    """A request that runs here. gateway: the front end that owns its stream.

    arrived_at: when it came here by a migration; None if it was submitted here.
    """

    epoch: int
    emitted: int
    gateway: str
    arrived_at: float | None = None


class OwnershipTable:
    """The requests of one llumlet, with the epochs and positions of what they emit; and where those
    that left went."""

    def __init__(self) -> None:
        self._here: dict[str, RequestOwner] = {}
        self._left: OrderedDict[str, str] = OrderedDict()

    def begin(
        self,
        request_id: str,
        epoch: int,
        emitted: int,
        gateway: str,
        arrived_at: float | None = None,
    ) -> None:
        """The request runs here from now on, `emitted` output tokens in."""
        self._here[request_id] = RequestOwner(epoch, emitted, gateway, arrived_at)
        self._left.pop(request_id, None)

    def get(self, request_id: str) -> RequestOwner | None:
        """The request's track; None if it doesn't run here."""
        return self._here.get(request_id)

    def end(self, request_id: str) -> None:
        """The request finished or was aborted. Unknown ids are ignored."""
        self._here.pop(request_id, None)

    def left(self, request_id: str, endpoint: str) -> None:
        """The request runs at `endpoint` now."""
        self._here.pop(request_id, None)
        self._left[request_id] = endpoint
        while len(self._left) > FORWARDED:
            self._left.popitem(last=False)

    def went_to(self, request_id: str) -> str | None:
        """The endpoint that it left for, if it is remembered."""
        return self._left.get(request_id)

    def arrived(self) -> dict[str, float]:
        """When the requests that were moved here came."""
        here = self._here.items()
        return {rid: track.arrived_at for rid, track in here if track.arrived_at is not None}

    def gateways(self) -> dict[str, str]:
        """Request -> front end."""
        return {rid: track.gateway for rid, track in self._here.items()}

    def requests_of(self, gateway: str) -> list[str]:
        """The requests of one front end."""
        return [rid for rid, track in self._here.items() if track.gateway == gateway]

    def spans(self, emitted: Iterable[EmittedTokens]) -> list[OutputSpan]:
        """Spans of one step's outputs, in order; finished requests are forgotten."""
        spans: list[OutputSpan] = []
        for entry in emitted:
            track = self._here.get(entry.request_id)
            if track is None:
                # Aborted meanwhile: its last output goes nowhere, whatever its span says.
                spans.append(OutputSpan(entry.request_id, -1, 0))
                continue
            spans.append(OutputSpan(entry.request_id, track.epoch, track.emitted))
            track.emitted += entry.tokens
            if entry.finished:
                del self._here[entry.request_id]
        return spans
