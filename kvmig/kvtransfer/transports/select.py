"""Which transport two llumlets use: the source offers, the destination takes what works."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvmig.ground.config import Transport
from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.messages import Offer
from kvmig.kvtransfer.transports import shm, tcp
from kvmig.kvtransfer.transports.base import Inbox, Staging

log = logging.getLogger(__name__)


def open_staging(
    allowed: Transport,
    cluster: str,
    instance: str,
    slots: int,
    slot_bytes: int,
    folder: Path = shm.FOLDER,
) -> dict[str, Staging]:
    """The pools of an instance by transport's name, the best first: offer them all.

    Raises TransportError if `allowed` is one transport that can't be had.
    """
    stagings: dict[str, Staging] = {}
    if allowed in ("auto", shm.NAME):
        try:
            stagings[shm.NAME] = shm.ShmStaging(cluster, instance, slots, slot_bytes, folder)
        except TransportError as error:
            if allowed == shm.NAME:
                raise
            log.warning("%s: KV blocks go over TCP only, %s", instance, error)
    if allowed in ("auto", tcp.NAME):
        stagings[tcp.NAME] = tcp.TcpStaging(slots, slot_bytes)
    return stagings


def open_offer(
    offers: Sequence[Offer], allowed: Transport = "auto", folder: Path = shm.FOLDER
) -> Inbox:
    """Open the first offer that works here.

    Raises TransportError, with each offer's reason, if none does.
    """
    reasons: list[str] = []
    for offer in offers:
        if allowed not in ("auto", offer.transport):
            reasons.append(f"{offer.transport}: this side takes {allowed} only")
            continue
        try:
            match offer.transport:
                case shm.NAME:
                    return shm.ShmInbox(offer, folder)
                case tcp.NAME:
                    return tcp.TcpInbox()
                case _:
                    reasons.append(f"{offer.transport}: unknown")
        except TransportError as error:
            reasons.append(f"{offer.transport}: {error}")
    raise TransportError("; ".join(reasons) or "the source offered no transport")


class Inboxes:
    """One inbox a source, opened at its first migration and kept for the next ones."""

    def __init__(self, allowed: Transport = "auto", folder: Path = shm.FOLDER) -> None:
        self._allowed = allowed
        self._folder = folder
        self._open: dict[tuple[Offer, ...], Inbox] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def open(self, offers: Sequence[Offer]) -> Inbox:
        """The inbox for these offers. Raises TransportError if none works."""
        self._drop_stale()
        key = tuple(offers)
        if key not in self._open:
            self._open[key] = open_offer(offers, self._allowed, self._folder)
        return self._open[key]

    def close(self) -> None:
        """Free all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def _drop_stale(self) -> None:
        """Free what sources that have ended left mapped here."""
        for key in [key for key, inbox in self._open.items() if inbox.stale]:
            self._open.pop(key).close()
