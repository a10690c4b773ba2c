"""The server of a host that stands by shows the host's relays which host leads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from kvmig.core.background import cancel_tasks, keep_running
from kvmig.fleet.leadership import LeaderRow
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spool_merger import SpoolMerger
from kvmig.fleet.standby import StandbyServer
from kvmig.proxy.control_link import ProxyLinks
from kvmig.proxy.messages import LeadingHost


class RelayLinks:
    """Shows a host's relays which host leads; use it in an `async with` block."""

    def __init__(self, path: str, led_by: Callable[[LeaderRow], None]) -> None:
        """path: of the socket for proxies. led_by: called with each server that is shown."""
        self._led_by = led_by
        self._leader = LeadingHost()
        self._links = ProxyLinks(path, lambda: (self._leader,), lambda proxy, news: None)

    def show_leader(self, row: LeaderRow) -> None:
        """Show the relays where calls go."""
        self._leader = LeadingHost(term=row.token, door=row.door)
        self._links.send_to_all(self._leader)
        self._led_by(row)

    async def __aenter__(self) -> Self:
        """Raises ConfigError."""
        await self._links.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._links.close()


async def stand_by(
    settings: FleetSettings,
    merger: SpoolMerger,
    led_by: Callable[[LeaderRow], None],
    lead: Callable[[], Awaitable[None]],
) -> None:
    """Return once this host's server leads. merger: counts what earlier calls of this host have
    used. The rest as in `StandbyServer`, with what it raises."""
    merging = asyncio.create_task(keep_running(merger.run, "usage"), name="usage")
    try:
        async with RelayLinks(str(settings.links), led_by) as relays:
            await StandbyServer(settings, relays.show_leader).wait(lead)
    finally:
        await cancel_tasks(merging)
