"""What an engine has of one request: its runs, and how far each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmig.engines.base import RequestTail
from kvmig.kvtransfer.messages import Chunk
from kvmig_tools.check.part import Violation


@dataclass
class Slot:
    """One run's. full: its full blocks; one more is part full. -1: it waits, and has none.
    tokens: those it put out. chunks: of its prompt, two blocks each, that are to be computed."""

    state: Literal["active", "suspended", "reserved"]
    tokens: int = 0
    full: int = 2
    chunks: int = 0
    written: int = 0
    """Bit i: block i came in."""
    room: bool = True
    """Whether blocks were reserved for it."""

    @property
    def decodes(self) -> bool:
        """Whether each step gives it a token: it is active, and its prompt is computed."""
        return self.state == "active" and self.full >= 0 and not self.chunks

    @property
    def length(self) -> int:
        """Of its prompt with what it put out, where chunks of a prompt count; else its blocks."""
        return self.full + 2 * self.chunks

    def rest(self, sent: int) -> RequestTail:
        """As `Engine.suspend` describes it. state: how many blocks it has."""
        blocks = list(range(sent, self.full + 1))
        return RequestTail(blocks, self.full, self.tokens, bytes([self.full + 1]))

    def write(self, chunk: Chunk) -> None:
        """Its blocks came in."""
        if not self.room:
            raise Violation("blocks come in that nobody reserved room for")
        for block in range(chunk.first, chunk.first + len(chunk.checksums)):
            self.written |= 1 << block


class Engine:
    """Of one instance, as far as one request goes."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}

    def active(self, run: str) -> Slot | None:
        """The run's slot, if it decodes or waits here."""
        slot = self.slots.get(run)
        return slot if slot is not None and slot.state == "active" else None

    def resume(self, run: str) -> None:
        """Nothing if it was aborted meanwhile, as in the port."""
        slot = self.slots.get(run)
        if slot is not None and slot.state == "suspended":
            slot.state = "active"

    def abort(self, run: str) -> None:
        """Of a run that is active, or is suspended; a reservation is cancelled by its session."""
        slot = self.slots.get(run)
        if slot is not None and slot.state in ("active", "suspended"):
            del self.slots[run]

    def cancel(self, run: str) -> None:
        """Give a reservation back."""
        slot = self.slots.get(run)
        if slot is not None and slot.state == "active":
            raise Violation("a committed request's blocks are freed by its migration")
        self.slots.pop(run, None)

    def commit(self, run: str, tail: RequestTail, last: Chunk | None) -> None:
        """A reserved run decodes from here, or waits here if it has no blocks."""
        slot = self.slots[run]
        if last is not None:
            slot.write(last)
        blocks = tail.state[0]
        if slot.written != (1 << blocks) - 1:
            raise Violation(f"a request decodes with blocks {slot.written:b} of {blocks}")
        slot.state, slot.tokens, slot.full = "active", tail.num_output_tokens, tail.state[0] - 1
