"""Calls that are ended by an order about all of a server's: at each of its front ends.

A front end knows only its own clients' calls, and an order comes to one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvmig.controlplane.front_messages import AbortCalls, CallsAborted
from kvmig.frontend.ports import OtherFronts

ASK_S = 10.0
"""Longest wait for other front ends to have ended theirs."""


async def end_nothing(request_ids: Sequence[str] | None) -> int:
    """End no call: the application has no such order."""
    return 0


class CallAborts:
    """Orders to end calls, of one front end."""

    def __init__(self) -> None:
        self.others: OtherFronts | None = None
        """The server's other front ends; None: there are none."""
        self.end_here: Callable[[Sequence[str] | None], Awaitable[int]] = end_nothing
        """Ends calls of this front end's clients, by their ids, None: all; how many."""

    async def end_elsewhere(self, request_ids: Sequence[str] | None) -> int:
        """Let the other front ends end these calls, None: all; how many they have ended. Raises
        LauncherGone."""
        if self.others is None:
            return 0
        ids = None if request_ids is None else tuple(request_ids)
        replies = await self.others.ask_fronts(AbortCalls(ids), timeout_s=ASK_S)
        return sum(one.count for one in replies.values() if isinstance(one, CallsAborted))

    async def reply(self, asked: AbortCalls) -> CallsAborted:
        """Answer another front end."""
        return CallsAborted(await self.end_here(asked.request_ids))
