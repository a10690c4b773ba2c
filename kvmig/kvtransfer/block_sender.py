"""Sends the blocks of one migration until they are sent, or a message says to stop."""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.kvtransfer.copier import Copier
from kvmig.kvtransfer.mailbox import Mailbox
from kvmig.kvtransfer.source_actions import Action
from kvmig.kvtransfer.timeline import Timeline


class BlockSender:
    """Every method returns what a message asks for instead, [] if none came in between."""

    def __init__(
        self, copier: Copier, mailbox: Mailbox, timeline: Timeline, block_bytes: int
    ) -> None:
        self.copier = copier
        self._mailbox = mailbox
        self._timeline = timeline
        self._block_bytes = block_bytes

    async def send_live(
        self, stage: int, first: int, block_ids: Sequence[int], places: Sequence[int] = ()
    ) -> list[Action]:
        """`send` while the request decodes: one stage of the report."""
        started = self._timeline.now()
        if stop := await self.send(stage, first, block_ids, places):
            return stop
        size = len(block_ids)
        parts = self.copier.end_stage()
        self._timeline.stage(size, size * self._block_bytes, started, parts)
        return []

    async def send(
        self,
        stage: int,
        first: int,
        block_ids: Sequence[int],
        places: Sequence[int] = (),
        urgent: bool = False,
    ) -> list[Action]:
        """Gather and send blocks of the request after the `first` ones that were sent.

        urgent: in the pause, each chunk by itself; else with those of other migrations.
        """
        for offset, ids in self.copier.cut(block_ids):
            where = places[offset : offset + len(ids)]
            if urgent:
                if stop := await self.ready():
                    return stop
                await self.copier.send(stage, first + offset, ids, urgent, where)
            else:
                news = self._mailbox.news
                while not await self.copier.ship(stage, first + offset, ids, where, news):
                    if stop := self._mailbox.read():
                        return stop
        return []

    async def ready(self) -> list[Action]:
        """Have a slot in hand for what comes next."""
        while not await self.copier.ready(self._mailbox.news):
            if stop := self._mailbox.read():
                return stop
        return []
