"""Where each request's tokens belong: epochs and positions, at the llumlet that emits them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvmig.controlplane.messages import Span
from kvmig.engines.base import Emitted

FORWARDED = 4096
"""Requests whose next place is remembered, so that a late abort finds them."""


@dataclass(slots=True)
class Track:
    """A request that runs here. gateway: the front end that owns its stream."""

    epoch: int
    emitted: int
    gateway: str


class Tracking:
    """The requests of one llumlet, and where those that left went."""

    def __init__(self) -> None:
        self._here: dict[str, Track] = {}
        self._left: OrderedDict[str, str] = OrderedDict()

    def begin(self, request_id: str, epoch: int, emitted: int, gateway: str) -> None:
        """It runs here from now on, `emitted` output tokens in."""
        self._here[request_id] = Track(epoch, emitted, gateway)
        self._left.pop(request_id, None)

    def get(self, request_id: str) -> Track | None:
        """None if it doesn't run here."""
        return self._here.get(request_id)

    def end(self, request_id: str) -> None:
        """It finished or was aborted. Unknown ids are ignored."""
        self._here.pop(request_id, None)

    def left(self, request_id: str, endpoint: str) -> None:
        """It runs at `endpoint` now."""
        self._here.pop(request_id, None)
        self._left[request_id] = endpoint
        while len(self._left) > FORWARDED:
            self._left.popitem(last=False)

    def went_to(self, request_id: str) -> str | None:
        """The endpoint that it left for, if it is remembered."""
        return self._left.get(request_id)

    def gateways(self) -> dict[str, str]:
        """Request -> front end."""
        return {rid: track.gateway for rid, track in self._here.items()}

    def of(self, gateway: str) -> list[str]:
        """All requests of one front end."""
        return [rid for rid, track in self._here.items() if track.gateway == gateway]

    def spans(self, emitted: Iterable[Emitted]) -> list[Span]:
        """Spans of one step's outputs, in order; finished requests are forgotten."""
        spans: list[Span] = []
        for entry in emitted:
            track = self._here.get(entry.request_id)
            if track is None:
                # Aborted meanwhile: its last output goes nowhere, whatever its span says.
                spans.append(Span(entry.request_id, -1, 0))
                continue
            spans.append(Span(entry.request_id, track.epoch, track.emitted))
            track.emitted += entry.tokens
            if entry.finished:
                del self._here[entry.request_id]
        return spans
