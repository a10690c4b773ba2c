"""What a source does when the destination doesn't say whether it has committed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvmig.kvtransfer.errand import Errand
from kvmig.kvtransfer.source_actions import Action
from kvmig.kvtransfer.source_machine import SourceMachine

log = logging.getLogger(__name__)

Resolve = Callable[[str, str, int, str], Awaitable[bool]]
"""(mid, request_id, epoch, destination) -> whether it moved. Raises when nobody can say; may wait
for ever: `ask_arbiter` gives each question a reply's time-out."""


async def ask_arbiter(machine: SourceMachine, errand: Errand, resolve: Resolve) -> list[Action]:
    """The arbiter's word, or a late answer of the destination: whichever comes first.

    The machine says how many questions may stay unanswered.
    """
    move = errand.move
    asking = asyncio.ensure_future(
        errand.bounded(resolve(move.mid, move.request_id, move.epoch, move.destination))
    )
    listening = asyncio.ensure_future(errand.mailbox.listen())
    try:
        await asyncio.wait((asking, listening), return_when=asyncio.FIRST_COMPLETED)
        return listening.result() if listening.done() else _resolved(machine, asking)
    finally:
        asking.cancel()
        listening.cancel()


def _resolved(machine: SourceMachine, asked: asyncio.Future[bool]) -> list[Action]:
    error = asked.exception()
    if error is None:
        return machine.resolved(moved=asked.result())
    if isinstance(error, TimeoutError):
        return machine.unreachable()
    log.error("%s: nobody can say who runs the request: %r", machine.key, error)
    return machine.orphaned()
