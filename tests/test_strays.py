"""Copies that nobody wants are told to stop: once, and heard."""

from __future__ import annotations

from kvmig.controlplane.messages import Discard, Span
from kvmig.gateway.strays import Strays
from kvmig.kvtransfer.messages import Message


def test_who_could_not_be_told_is_told_again() -> None:
    told: list[tuple[str, Message]] = []
    sent = [False, True]

    def tell(instance: str, message: Message) -> bool:
        told.append((instance, message))
        return sent.pop(0)

    strays = Strays(tell)
    for start in range(3):
        strays.stop("i0", Span("r", 1, start), last=False)
    assert told == [("i0", Discard("r", 1))] * 2
