"""The host whose proxies take a fleet's calls, and how the proxies of other hosts reach them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from kvmig.core.background import BackgroundTasks
from kvmig.proxy.messages import LeadingHost
from kvmig.proxy.relay import UpstreamCall

CONNECT_S = 2.0
"""Timeout of one connection with its handshake; a call tries again after it."""
IDLE_S, PROBES = 5, 5
"""Seconds without a byte after which a connection is tested every second, and tests without an
answer after which it ends: the host is gone, or the network to it."""
FINISH_S = 60.0
"""Time that calls on a host have to finish once another host leads."""


class HostLink:
    """Connections to the host that leads. Make it inside a running event loop; `close` it."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        """context: of the client's end; it raises OSError while there is no pepper."""
        self.leader = LeadingHost()
        self._context = context
        self._made: ssl.SSLContext | None = None
        self._open: dict[UpstreamCall, int] = {}
        """The term of the host of each connection."""
        self._tasks = BackgroundTasks("hosts")

    async def close(self) -> None:
        """End what waits."""
        await self._tasks.close()

    def take_leader(self, leader: LeadingHost) -> None:
        """Take which host leads; one of an earlier term is refused."""
        if leader.term <= self.leader.term:
            return
        self.leader = leader
        if self._open:
            self._tasks.start(self._end_earlier(leader.term), "calls on an earlier host")

    async def dial(self) -> UpstreamCall | None:
        """A new connection for one call; None: it can't be had now."""
        host, _, port = self.leader.door.rpartition(":")
        if not host:
            return None
        term = self.leader.term
        try:
            async with asyncio.timeout(CONNECT_S):
                upstream = await self._connect(host.strip("[]"), int(port))
        except OSError:  # a TimeoutError and an SSLError, too
            return None
        self._open[upstream] = term
        upstream.closed.add_done_callback(lambda _: self._open.pop(upstream, None))
        return upstream

    async def _connect(self, host: str, port: int) -> UpstreamCall:
        """Raises OSError, TimeoutError."""
        self._made = self._made or self._context()
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            sock.setblocking(False)
            _notice_death(sock)
            await loop.sock_connect(sock, (host, port))
            _, upstream = await loop.create_connection(
                UpstreamCall, sock=sock, ssl=self._made, server_hostname=host
            )
        except BaseException:
            sock.close()
            raise
        return upstream

    async def _end_earlier(self, term: int) -> None:
        await asyncio.sleep(FINISH_S)
        for upstream, its in list(self._open.items()):
            if its < term:
                upstream.abort()


def _notice_death(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (IDLE_S + PROBES))
