"""The clients' entry of a host that stands by: every call goes to the proxies of the host that
leads.

The proxies there decide about it and count it: a key, a limit and a quota are the same on all
hosts, and as exact as on one. A call waits here while no host leads.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import cast

from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send

from kvmig.asgi import request_body as gateway
from kvmig.asgi.body_budget import BodyBudget
from kvmig.asgi.request_body import BodyRules
from kvmig.asgi.route_table import LIVE_PATH
from kvmig.core.clock import monotonic
from kvmig.core.config import BODIES, HttpConfig
from kvmig.proxy.call import (
    CLIENT_ADDRESS,
    NOTHING,
    ClientGone,
    ProxiedCall,
    on_lost_nothing,
    serve_call,
)
from kvmig.proxy.leading_host import HostLink
from kvmig.proxy.refusals import ProxyRefusal
from kvmig.proxy.relay import CROSS_ORIGIN, OWN, CloseFraming, UpstreamCall, UpstreamProtocolError

NOT_PASSED = OWN | {b"content-length", b"expect", b"transfer-encoding", CLIENT_ADDRESS}
WAIT_S = 15.0
"""Time that a call waits for a host that leads: longer than a take-over takes."""
RETRY_S = 0.1
BROKE_OFF = "the host that serves broke off before it answered, try again"
ENDED = "the host that served ended while it answered"


class StandbyRelay:
    """The relay's ASGI application. Serve it by `DoorConnection` only."""

    def __init__(self, hosts: HostLink, config: HttpConfig) -> None:
        self._hosts = hosts
        self._config = config
        self._budget = BodyBudget(BODIES * config.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await serve_call(ProxiedCall(scope, receive, send), self._serve)

    async def _serve(self, call: ProxiedCall) -> None:
        if call.path == LIVE_PATH:
            await call.answer(HTTPStatus.OK, b"")
            return
        if call.connection.too_many:
            call.limits = [(b"connection", b"close")]
            sentence = "this host has as many clients as its open files are for (ulimit -Hn)"
            raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "proxy_full", 1.0)
        call.body = self._budget.enter(call.address)
        rules = BodyRules(
            self._config.max_body, self._config.body_timeout_s, unread=self._config.max_body
        )
        headers = MutableHeaders(raw=call.scope["headers"])
        message = await gateway.read_body(rules, call.body, headers, call.receive_part)
        if message is None:
            raise ClientGone
        self._ask(call, cast("bytes", message["body"]))
        upstream = await self._reach(call)
        try:
            await self._pass_answer(call, upstream)
        finally:
            upstream.abort()

    def _ask(self, call: ProxiedCall, content: bytes) -> None:
        every: list[tuple[bytes, bytes]] = call.scope["headers"]
        passed = [one for one in every if one[0] not in NOT_PASSED]
        passed.append((CLIENT_ADDRESS, call.address.encode()))
        query: bytes = call.scope["query_string"]
        path: bytes = call.scope["raw_path"] + (b"?" + query if query else b"")
        call.set_request(path, passed, content)

    async def _reach(self, call: ProxiedCall) -> UpstreamCall:
        """A connection to the host that leads, once there is one. Raises ProxyRefusal, or
        ClientGone."""
        until = monotonic() + WAIT_S
        while (upstream := await self._hosts.dial()) is None:
            call.check()
            if monotonic() >= until:
                sentence = "no host of the fleet serves now, try again"
                raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "no_host", 1.0)
            await asyncio.sleep(RETRY_S)
        if call.gone:
            upstream.abort()
        call.check()
        return upstream

    async def _pass_answer(self, call: ProxiedCall, upstream: UpstreamCall) -> None:
        call.connection.on_lost = call.hang_up = upstream.abort
        try:
            upstream.send(call.method, *call.asking, written=call.give_body_back)
            call.asking = NOTHING
            try:
                head = await upstream.head
            except UpstreamProtocolError as error:
                call.check()
                status = HTTPStatus.SERVICE_UNAVAILABLE
                raise ProxyRefusal(status, BROKE_OFF, "host_ended", 1.0) from error
            if isinstance(upstream.framing, CloseFraming):
                call.cycle.keep_alive = False
            call.cross_origin = [one for one in head.headers if one[0].startswith(CROSS_ORIGIN)]
            call.begin(head, [])
            await call.pass_on(upstream)
            if not upstream.framing.ended:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                call.cut = call.cut or ProxyRefusal(status, ENDED, "host_ended")
            call.end(upstream, head.events)
        finally:
            call.connection.on_lost = on_lost_nothing
