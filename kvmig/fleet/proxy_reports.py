"""What a fleet's proxies have said last: what they know, relay and hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvmig.proxy.messages import ProxyDemand


@dataclass(eq=False)
class ConnectedProxy:
    """What a proxy has said."""

    version: int = 0
    running: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by model and deployment's socket."""
    held: Counter[str] = field(default_factory=Counter)
    """Requests by model."""


class ProxyReports:
    """The reports of all connected proxies."""

    def __init__(self) -> None:
        self._proxies: dict[str, ConnectedProxy] = {}

    def take_report(self, proxy: str, demand: ProxyDemand) -> None:
        """Take a report in place of the proxy's last one."""
        known = self._proxies[proxy] = ConnectedProxy(demand.version)
        for one in demand.models:
            known.running[one.model, one.socket] += one.running
            known.held[one.model] += one.held

    def forget(self, proxy: str) -> None:
        """Forget a proxy that is gone, or whose link is."""
        self._proxies.pop(proxy, None)

    def known_to_all(self, version: int, proxies: int = 0) -> bool:
        """Whether every connected proxy knows of that version. proxies: how many must be connected;
        one that isn't yet, to a server that has just started, serves by what it knew."""
        connected = self._proxies.values()
        return len(connected) >= proxies and all(one.version >= version for one in connected)

    @property
    def connected(self) -> int:
        """Proxies that have said something."""
        return len(self._proxies)

    def running(self, name: str) -> int:
        """Requests that proxies relay to the model now."""
        return sum(
            count
            for one in self._proxies.values()
            for (model, _), count in one.running.items()
            if model == name
        )

    def running_at(self, name: str, socket: str) -> int:
        """The running requests that go to one of its deployments."""
        return sum(one.running[name, socket] for one in self._proxies.values())

    def held(self, name: str) -> int:
        """Requests that wait for the model's start."""
        return sum(one.held[name] for one in self._proxies.values())
