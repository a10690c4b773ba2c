"""What a proxy's process does on a host that stands by: it relays calls to the host that leads."""

from __future__ import annotations

from pathlib import Path

from kvmig.proxy.control_link import ServerLink
from kvmig.proxy.door_server import DoorServer
from kvmig.proxy.leading_host import HostLink
from kvmig.proxy.messages import Down, LeadingHost, ProxyLaunch
from kvmig.proxy.peer_tls import peer_context
from kvmig.proxy.standby_relay import StandbyRelay


class RelayServer(DoorServer):
    """A relay; make it inside a running event loop, `start` it, then `stop` it."""

    def __init__(self, launch: ProxyLaunch, listening: int) -> None:
        """listening: descriptor of the port's socket. Raises as `DoorServer`."""
        super().__init__(launch, listening)
        self._launch = launch
        pepper = Path(launch.pepper)
        self._hosts = HostLink(lambda: peer_context(pepper, server=False))
        self._relay = StandbyRelay(self._hosts, launch.http)
        self._link: ServerLink | None = None

    async def start(self) -> None:
        """Take calls. Raises StartupError."""
        self._link = ServerLink(self._launch.links, self._launch.name, self._take)
        await self.begin(self._relay, lambda status: None)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that are there get a time to end."""
        await super().stop(grace_s)
        await self._hosts.close()
        if self._link is not None:
            await self._link.close()

    def _take(self, message: Down) -> None:
        if isinstance(message, LeadingHost):  # all else is for proxies of the host that leads
            self._hosts.take_leader(message)
