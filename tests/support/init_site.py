"""Deployments of a fleet's init, without its server and proxies."""

from __future__ import annotations

import socket

from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.settings import FleetSettings, make_folders
from kvmig.fleet.supervisor import FleetSupervisor


class InitSite:
    """Use it inside a running event loop, in a `with` block."""

    def __init__(self, settings: FleetSettings) -> None:
        make_folders(settings)
        self._sock = socket.socket()
        self._init = FleetSupervisor(settings, self._sock)

    def __enter__(self) -> InitSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    async def run(self, start: StartDeployment) -> None:
        """A deployment, from its start to its end."""
        await self._init._deploy(start)

    @property
    def deployments(self) -> list[str]:
        """Those that the next server would be told of."""
        return list(self._init._deployments)
