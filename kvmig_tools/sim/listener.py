"""Who hears of an engine's requests."""

from __future__ import annotations

from typing import Protocol

from kvmig_tools.sim.request import SimRequest


class Listener(Protocol):
    """Who hears of an engine's requests."""

    def changed(self) -> None:
        """What it holds may have changed."""
        ...

    def first_token(self, request: SimRequest) -> None:
        """Its first token is out."""
        ...

    def finished(self, request: SimRequest) -> None:
        """Its last token is out, and nothing of it is left here."""
        ...

    def preempted(self, request: SimRequest) -> None:
        """Its blocks were taken; it waits again."""
        ...
