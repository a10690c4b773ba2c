"""How many connections to a server were never let in. Pure.

libzmq tells which descriptor was accepted or closed; that a handshake succeeded or failed, but not
whose; and of a failure nothing where the peer doesn't even speak ZeroMQ (libzmq 4.3.5,
src/zmtp_engine.cpp). Those are what is left: accepted, not succeeded, and gone.
"""

from __future__ import annotations

HANDSHAKE_S = 30.0
"""A handshake that takes longer has failed."""


class Handshakes:
    """Of one server. Remembers open connections only, each for HANDSHAKE_S at most."""

    def __init__(self) -> None:
        self._young: dict[int, float] = {}
        """Open connections by descriptor, and since when: their handshakes may be under way."""
        self._undecided = 0
        """Accepted, and not known to have succeeded or failed; which ones is unknown."""
        self._failed = 0

    def accepted(self, descriptor: int, now: float) -> None:
        """now: in seconds."""
        self._young[descriptor] = now
        self._undecided += 1

    def succeeded(self) -> None:
        """One of those that are open."""
        self._decided()

    def failed(self) -> None:
        """One of those that are open; told twice of some, which isn't counted if it can be seen."""
        if self._undecided > 0:
            self._failed += 1
            self._decided()

    def closed(self, descriptor: int) -> None:
        """Whether let in before or not."""
        self._young.pop(descriptor, None)

    def failures(self, now: float) -> int:
        """So many more than when last asked.

        Those of which libzmq says nothing, while another's handshake was under way, may be told
        as late as HANDSHAKE_S after that.
        """
        for old in [one for one, since in self._young.items() if now - since > HANDSHAKE_S]:
            del self._young[old]
        gone = max(0, self._undecided - len(self._young))
        self._undecided -= gone
        failed, self._failed = self._failed + gone, 0
        return failed

    def _decided(self) -> None:
        self._undecided -= 1
        if self._undecided <= 0:
            self._young.clear()
