"""The clients' door: a key, a model, a route; then the call's bytes go to the model's deployment.

A model that is not there yet is wanted from the server, and the call is held meanwhile (`hold`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from math import ceil, inf
from typing import Any, cast

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvmig.accounts.keys import (
    BAD_KEY,
    EXPIRED,
    QUOTA_CODE,
    QUOTA_WORDS,
    THE_KEY,
    Denied,
    KeyGrant,
    Limited,
    Limits,
    Quota,
    allows,
    limited_by,
    no_model,
    quota_used_up,
    quotas_of,
)
from kvmig.accounts.keys import Scope as KeyScope
from kvmig.accounts.limits import WHOLE, Limiter, Part, headers, let_in
from kvmig.gateway import request_body as gateway
from kvmig.gateway.body_budget import BodyBudget
from kvmig.gateway.error_forms import EventNumbers, api_of
from kvmig.gateway.error_stage import ErrorStage
from kvmig.gateway.http import CALL_ID, PRIORITY, UNREAD_BYTES, Connection, accepted
from kvmig.gateway.request_body import BodyRules
from kvmig.gateway.requests import HttpCall
from kvmig.gateway.route_table import Api
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import BODIES, HttpConfig
from kvmig.proxy.calls import (
    Body,
    asked,
    bad,
    body_of,
    error_body,
    error_event,
    heartbeat,
    target,
)
from kvmig.proxy.directory import Directory
from kvmig.proxy.exposition import merged, parsed
from kvmig.proxy.hold import Counted, Counts, Go, Hold, Refused, Stay, Waiter, left_s, verdict
from kvmig.proxy.messages import (
    Down,
    Keys,
    ModelDemand,
    QuotaLeft,
    Route,
    Snapshot,
    Spent,
)
from kvmig.proxy.relay import (
    LAST_CHUNK,
    OWN,
    Broken,
    Chunked,
    Head,
    Unframed,
    Upstream,
    error_of,
)

SHOWN = "kvmig.connection"
"""Key of an ASGI scope's connection and its cycle."""
FLEET = "/kvmig/"
"""Prefix of the paths that the server answers."""
FIGURES = b"/kvmig/v2/metrics"
COLD = "x-kvmig-cold"
COLD_MS = b"x-kvmig-cold-start-ms"
ACCOUNT = b"x-kvmig-account"
TENANT = b"x-kvmig-tenant"
QUOTA = b"x-kvmig-quota"
KVMIG = b"x-kvmig-"
KEY_HEADERS = (b"authorization", b"x-api-key")
NOT_PASSED = OWN | {
    b"content-length", b"expect", b"forwarded", b"transfer-encoding", b"x-real-ip",
}  # fmt: skip
FORWARDED = b"x-forwarded-"
DAY_S = 86400.0
"""Longer than a call lasts: keys that expire later need no timer for it."""
EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n"
)
NOTHING = (b"", b"")
DIED = Refused(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "the model's deployment ended while it answered",
    "deployment_ended",
)


def _nothing() -> None:
    pass


class Gone(Exception):
    """The client has left."""


class DoorConnection(Connection):
    """A client's connection. It shows itself to the door, which writes to it."""

    each = 2
    """The other one is a deployment's."""
    too_many = False
    """Whether it is of the last tenth that there can be: its calls are told so."""
    upstream: Upstream | None = None
    """Whose answer goes to the client now."""
    on_lost: Callable[[], None] = staticmethod(_nothing)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.too_many = len(self.connections) > 0.9 * self.most

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[SHOWN] = (self, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.upstream is not None:
            self.upstream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.upstream is not None:
            self.upstream.resume()


class Call:
    """One HTTP call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, cycle = scope[SHOWN]
        self.connection: DoorConnection = connection
        self.cycle: RequestResponseCycle = cycle
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = Headers(raw=scope["headers"])
        self.call_id = accepted(self.headers.get(CALL_ID))
        self.api: Api = api_of(self.path)
        self.asking = NOTHING
        """Head and body, as they go on."""
        self.numbers = EventNumbers()
        self.beats = 0
        """Signs of life that were sent; from the first on the answer is a stream."""
        self.cut: Refused | None = None
        """Why it may not go on."""
        self.quotas: Sequence[Quota] = ()
        """Of its key and its user, that hold for its model."""
        self.limits: list[tuple[bytes, bytes]] = []
        """Headers that tell of limits."""

    @property
    def address(self) -> str:
        """The client's, as the socket says: uvicorn would believe a header."""
        client = self.connection.client
        return client[0] if client else ""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self.connection.transport.is_closing()

    @property
    def key(self) -> str:
        """As OpenAI's clients send it, or Anthropic's."""
        kind, _, given = self.headers.get("authorization", "").partition(" ")
        return (given if kind.lower() == "bearer" else self.headers.get("x-api-key", "")).strip()

    @property
    def has_body(self) -> bool:
        """Whether one comes, or is there."""
        return self.headers.get("content-length", "0") != "0" or "transfer-encoding" in self.headers

    def ask(self, path: bytes, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """What a deployment, or the server, will be asked. path: with the query."""
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), path)]
        lines += [b"%s: %s" % one for one in headers]
        lines.append(b"x-request-id: %s\r\nconnection: close" % self.call_id.encode())
        if content or self.method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            lines.append(b"content-length: %d" % len(content))
        self.asking = (b"\r\n".join(lines) + b"\r\n\r\n", content)

    def check(self) -> None:
        """Raises Gone for a client that has left, Refused for a call that may not go on."""
        if self.gone:
            raise Gone
        if self.cut is not None:
            raise self.cut

    # -- answers of the proxy's own

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """All of it."""
        response = Response(body, status, {**(headers or {}), CALL_ID: self.call_id}, kind)
        await response(self.scope, self.receive, self.send)

    async def refuse(self, why: Refused, unread: int = 0) -> None:
        """An error, in the form that fits what the client has got so far.

        unread: how much of the call's body is taken, and dropped; the connection is closed then.
        """
        if self.beats:
            self._write_chunk(error_event(self.api, why.status, str(why), why.code))
            self.connection.transport.write(LAST_CHUNK)
            self.finish()
            return
        headers = {name.decode(): value.decode() for name, value in self.limits}
        if why.again_s is not None:
            headers["Retry-After"] = str(max(1, ceil(why.again_s)))
        if why.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if unread:
            headers["connection"] = "close"
            await gateway.discard(self.receive, unread)
        body = error_body(self.api, why.status, str(why), why.code)
        await self.answer(why.status, body, headers=headers)

    def beat(self, sentence: str) -> None:
        """Show a waiting client that the call lives."""
        if not self.beats:
            own = b"x-request-id: %s\r\n" % self.call_id.encode()
            if not self.cycle.keep_alive:
                own += b"connection: close\r\n"
            self.connection.transport.write(EVENTS + own + b"\r\n")
            self.cycle.response_started = True
        self._write_chunk(heartbeat(self.api, sentence))
        self.beats += 1

    def _write_chunk(self, data: bytes) -> None:
        self.connection.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    # -- answers of a deployment

    def begin(self, head: Head, own: list[tuple[bytes, bytes]]) -> None:
        """Write its head, with headers of our own."""
        own = [*own, *self.limits, (CALL_ID.encode(), self.call_id.encode())]
        if not self.cycle.keep_alive:
            own.append((b"connection", b"close"))
        self.connection.transport.write(head.rewritten(own))
        self.cycle.response_started = True

    async def pass_on(self, upstream: Upstream) -> None:
        """Its body, as it comes."""
        connection = self.connection
        connection.upstream = upstream
        if self.api == "responses":
            upstream.watch = self.numbers.feed
        try:
            upstream.pass_to(connection.transport)
            if connection.flow.write_paused:
                upstream.pause()
            await upstream.ended
        finally:
            connection.upstream = None

    def end(self, upstream: Upstream, events: bool) -> None:
        """Whether its answer is complete or not."""
        if self.gone or upstream.framing.ended:
            self.finish()
        elif events and upstream.framing.whole:
            why = self.cut or DIED
            number = self.numbers.next
            self._write_chunk(error_event(self.api, why.status, str(why), why.code, number))
            self.connection.transport.write(LAST_CHUNK)
            self.finish()
        else:
            self.cycle.keep_alive = False  # the client must see that something is missing
            self.finish()

    def finish(self) -> None:
        """The answer is written."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.connection.transport.close()
        cycle.on_response()


class DoorMetrics:
    """What /metrics shows."""

    def __init__(self, counts: Counts, age_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._counts = counts
        self.requests = prometheus_client.Counter(
            "kvmig_proxy_requests_total",
            "Calls that were answered, by model (empty: none that is there) and status.",
            ("model", "status"),
            registry=self.registry,
        )
        self.cold_start = prometheus_client.Histogram(
            "kvmig_proxy_cold_start_seconds",
            "For how long requests were held that were then relayed.",
            ("model",),
            registry=self.registry,
            buckets=(0.1, 0.3, 1, 2, 5, 10, 30, 60, 120, 300, 600),
        )
        self.relayed = prometheus_client.Counter(
            "kvmig_proxy_relay_bytes_total",
            "Bytes of answers that were relayed.",
            registry=self.registry,
        )
        age = prometheus_client.Gauge(
            "kvmig_proxy_snapshot_age_seconds",
            "Time since the server was heard: what is known of keys and routes is so old.",
            registry=self.registry,
        )
        age.set_function(age_s)
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Of prometheus_client."""
        running = GaugeMetricFamily(
            "kvmig_proxy_running", "Requests relayed now.", labels=["model"]
        )
        held = GaugeMetricFamily("kvmig_proxy_held", "Requests held now.", labels=["model"])
        for model, (runs, waits) in self._counts.states().items():
            running.add_metric([model], runs)
            held.add_metric([model], waits)
        return running, held


class Door:
    """The proxy's ASGI application. Serve it by `DoorConnection` only."""

    def __init__(
        self,
        directory: Directory,
        config: HttpConfig,
        api: str,
        want: Callable[[str], None],
        age_s: Callable[[], float] = lambda: 0.0,
        clock: Clock = monotonic,
        wall: Clock = time.time,
        part: Part = WHOLE,
        since: float = -inf,
    ) -> None:
        """api: path of the server's HTTP socket. want: tells the server of a cold model.

        age_s: of what is known. wall: Unix time. part: which proxy of how many this is.
        since: by the clock, when it took the place of another one, or began.
        """
        self.directory = directory
        self.config = config
        self.budget = BodyBudget(BODIES * config.max_body)
        self.hold = Hold(BODIES * config.max_body)
        self.counts = Counts()
        self.metrics = DoorMetrics(self.counts, age_s)
        self._part = part
        self._since = since
        self._api = api
        self._want = want
        self._clock = clock
        self._wall = wall
        self._closed = False
        self._turns: dict[Waiter, asyncio.Future[None]] = {}
        self._calls: dict[str, set[Call]] = {}
        """By the prefixes of their keys."""
        self._limiters: dict[str, Limiter] = {}
        """Of keys and users that came here or have spent tokens, by `Limited.id`."""
        self._left: dict[str, QuotaLeft] = {}
        """By `Quota.id`."""

    # -- what the server tells, and hears

    def apply(self, message: Down) -> None:
        """Take it; those go on who waited for it, in their order. What revoked keys do ends."""
        if isinstance(message, Spent):
            self._take_spent(message)
            return
        for model in self.directory.apply(message):
            self._wake(model)
        if isinstance(message, (Keys, Snapshot)):
            for prefix in [one for one in self._calls if not self.directory.knows(one)]:
                for call in list(self._calls[prefix]):
                    _cut(call, BAD_KEY)

    def _take_spent(self, spent: Spent) -> None:
        now = self._clock()
        for whose, level in spent.owed.items():
            limiter = self._limiters.setdefault(whose, self._limiter(Limits()))
            limiter.bucket.told(level, now)
        self._left.update(spent.left)

    def wishes(self) -> list[str]:
        """Cold models that somebody waits for."""
        routes = self.directory.routes
        return [one for one in self.hold.models() if one in routes and routes[one].state == "cold"]

    def demands(self) -> tuple[ModelDemand, ...]:
        """What there was to do since the last call."""
        return self.counts.demands(self._clock())

    def figures(self) -> bytes:
        """What this proxy has to tell Prometheus."""
        own = generate_latest(self.metrics.registry).decode()
        return merged([parsed(({"proxy": str(self._part.number)}, own))])

    def close(self) -> None:
        """Hold nobody any more: the proxy stops."""
        self._closed = True
        for model in self.hold.models():
            self._wake(model)

    def count_refused(self, status: int) -> None:
        """A call that ended before it was one."""
        self.metrics.requests.labels("", status).inc()

    def _wake(self, model: str) -> None:
        for waiter in self.hold.waiting(model):
            if (turn := self._turns.get(waiter)) is not None and not turn.done():
                turn.set_result(None)

    # -- calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        call = Call(scope, receive, send)
        try:
            await self._serve(call)
        except Refused as why:
            self.count_refused(why.status)
            if not call.gone:
                comes = call.cycle.more_body and "expect" not in call.headers
                await call.refuse(why, UNREAD_BYTES if comes else 0)
        except gateway.Refused as refused:  # for its body
            self.count_refused(refused.answer.status_code)
            if refused.unread and "expect" not in call.headers:
                await gateway.discard(receive, refused.unread)
            stage = ErrorStage(call.api, HttpCall(call.call_id), send, worded=True)
            await refused.answer(scope, receive, stage.send)
        except Gone:
            call.finish()

    async def _serve(self, call: Call) -> None:
        if call.path == "/health":
            there = self.directory.version >= 0
            await call.answer(HTTPStatus.OK if there else HTTPStatus.SERVICE_UNAVAILABLE, b"")
        elif call.connection.too_many:
            call.limits = [(b"connection", b"close")]
            sentence = "this proxy has as many clients as its open files are for (ulimit -Hn)"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "proxy_full", 1.0)
        elif call.path.startswith(FLEET):
            await self._ask_server(call)
        elif call.path == "/metrics":
            self._let_in(call, "admin")
            await self._tell_figures(call)
        elif call.method == "GET" and call.path.startswith("/v1/models"):
            await self._list(call, self._let_in(call, "infer"))
        else:
            await self._infer(call, self._let_in(call, "infer"))

    def _let_in(self, call: Call, scope: KeyScope) -> KeyGrant:
        """Raises Refused, 401 or 403."""
        grant = self.directory.grant(call.key)
        if grant is None:
            raise _refused(BAD_KEY)
        denied = allows(grant, None, call.address, self._wall(), scope)
        if denied is not None:
            raise _refused(denied)
        return grant

    async def _list(self, call: Call, grant: KeyGrant) -> None:
        rows = {name: _listed(name, route) for name, route in self.directory.names(grant)}
        name = call.path.removeprefix("/v1/models").removeprefix("/")
        if not name:
            answer: dict[str, Any] = {"object": "list", "data": list(rows.values())}
        elif name in rows:
            answer = rows[name]
        else:
            raise _refused(no_model(name))
        await call.answer(HTTPStatus.OK, msgspec.json.encode(answer))

    async def _read(self, call: Call) -> bytes:
        """The call's body. Raises Gone, or the gateway's Refused."""
        headers = MutableHeaders(raw=call.scope["headers"])
        rules = BodyRules(self.config.max_body, self.config.body_timeout_s)
        share = self.budget.enter()
        message = await gateway.read_body(rules, share, headers, call.receive)
        share.give_back()
        if message is None:
            raise Gone
        return cast("bytes", message["body"])

    # -- to the server

    async def _tell_figures(self, call: Call) -> None:
        """The whole fleet's, from the server; without a server this proxy's own."""
        headers = [
            (b"x-forwarded-for", call.address.encode()),
            (b"authorization", b"Bearer " + call.key.encode()),
        ]
        call.ask(FIGURES, headers, b"")
        upstream = await _connect(self._api)
        if upstream is None:
            await call.answer(HTTPStatus.OK, self.figures(), CONTENT_TYPE_LATEST)
        else:
            await self._relay(call, upstream, "", [])

    async def _ask_server(self, call: Call) -> None:
        if call.has_body and self.directory.grant(call.key) is None:
            raise _refused(BAD_KEY)  # the server looks at the key; this keeps no stranger's body
        content = await self._read(call)
        headers = _passed(call, (FORWARDED, KVMIG))
        headers.append((b"x-forwarded-for", call.address.encode()))
        call.ask(target(call.path, call.scope["query_string"]), headers, content)
        upstream = await _connect(self._api)
        if upstream is None:
            sentence = "the fleet's server is not there, try again"
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "server_away", 1.0)
        await self._relay(call, upstream, "", [])

    # -- to a model

    async def _infer(self, call: Call, grant: KeyGrant) -> None:
        waiter = await self._prepare(call, grant)
        limiters = [self._limiter_of(one) for one in limited_by(grant)]
        self._check_limits(call, limiters)
        expires_s = float("inf") if grant.expires is None else grant.expires - self._wall()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(expires_s, _cut, call, EXPIRED) if expires_s < DAY_S else None
        try:
            await self._reach_and_relay(call, grant, waiter)
        finally:
            for one in limiters:
                one.leave()
            if timer is not None:
                timer.cancel()

    def _limiter_of(self, whose: Limited) -> Limiter:
        limiter = self._limiters.get(whose.id)
        if limiter is None:
            limiter = self._limiters[whose.id] = self._limiter(whose.limits, whose.name)
        elif limiter.limits is not whose.limits:
            limiter.name = whose.name
            limiter.renew(whose.limits, self._clock())
        return limiter

    def _limiter(self, limits: Limits, name: str = THE_KEY) -> Limiter:
        return Limiter(limits, self._part, name, self._since)

    def _check_limits(self, call: Call, limiters: Sequence[Limiter]) -> None:
        """Let the call in, or raise Refused, 429."""
        wall = self._wall()
        for quota in call.quotas:
            left = self._left.get(quota.id)
            if left is not None and left.says_no(wall):
                raise _refused(quota_used_up(quota, left.anew))
        now = self._clock()
        exceeded = let_in(limiters, now)
        call.limits = headers(limiters, now)
        if exceeded is not None:
            status = HTTPStatus.TOO_MANY_REQUESTS
            raise Refused(status, exceeded.sentence, "rate_limit_exceeded", exceeded.again_s)

    async def _reach_and_relay(self, call: Call, grant: KeyGrant, waiter: Waiter) -> None:
        calls = self._calls.setdefault(grant.prefix, set())
        calls.add(call)
        counted = self.counts.arrive(waiter.model, self._clock())
        try:
            upstream = await self._reach(call, waiter, counted)
            await self._relay(call, upstream, waiter.model, self._cold_start(waiter))
        finally:
            counted.be("over", self._clock())
            calls.remove(call)
            if not calls:
                self._calls.pop(grant.prefix, None)

    async def _prepare(self, call: Call, grant: KeyGrant) -> Waiter:
        """Know what the call asks for. Raises Refused, or Gone."""
        where = asked(call.path)
        call.api = api_of(where.path)
        body = body_of(await self._read(call), call.headers)
        name = where.model or body.model
        if not name:
            sentence = "model is missing: the body names it, or the path as in /models/NAME/v1/..."
            raise bad(sentence, "model_missing")
        denied = allows(grant, name, call.address, self._wall())
        found = self.directory.find(name, call.call_id)
        if denied is not None or found is None:
            raise _refused(denied or no_model(name))
        passed = _passed(call, (FORWARDED, KVMIG, *KEY_HEADERS))
        passed.append((ACCOUNT, grant.key_id.encode()))
        passed.append((TENANT, grant.user_id.encode()))
        call.quotas = quotas_of(grant, found.model)
        if call.quotas:
            passed.append((QUOTA, b"1"))
        content = body.naming(found.served)
        call.ask(target(where.path, call.scope["query_string"]), passed, content)
        return Waiter(
            model=found.model,
            priority=self._priority(call, body, found.model),
            size=len(content),
            since=self._clock(),
            beats=body.stream,
        )

    def _priority(self, call: Call, body: Body, model: str) -> int:
        given = call.headers.get(PRIORITY, "")
        with contextlib.suppress(ValueError):
            return int(given[:20])
        if body.priority is not None:
            return body.priority
        route = self.directory.routes.get(model)
        return 0 if route is None else route.priority

    def _cold_start(self, waiter: Waiter) -> list[tuple[bytes, bytes]]:
        if not waiter.number:
            return []
        held_s = self._clock() - waiter.since
        self.metrics.cold_start.labels(waiter.model).observe(held_s)
        return [(COLD_MS, b"%d" % (held_s * 1e3))]

    async def _reach(self, call: Call, waiter: Waiter, counted: Counted) -> Upstream:
        """A connection to the model's deployment, once it is there. Raises Refused, or Gone."""
        try:
            while True:
                if self._closed:
                    sentence = "the proxy is stopping, try again"
                    raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "stopping", 1.0)
                route = self.directory.routes.get(waiter.model)
                match verdict(route, waiter, self._clock()):
                    case Go(socket):
                        counted.be("running", self._clock())  # before anything of it is on its way
                        upstream = await _connect(socket)
                        if upstream is not None and not call.gone and call.cut is None:
                            return upstream
                        if upstream is not None:
                            upstream.abort()
                        call.check()
                        waiter.tried = self._clock()
                    case Stay(seconds, beat):
                        assert route is not None
                        self._stay(call, waiter, route)
                        counted.be("held", self._clock())
                        if beat:
                            waiter.beaten = self._clock()
                            call.beat(_starting(route, waiter, self._clock()))
                        await self._turn(call, waiter, seconds)
                    case Refused() as why:
                        raise why
        finally:
            self.hold.leave(waiter)

    def _stay(self, call: Call, waiter: Waiter, route: Route) -> None:
        """It waits from now on, if it doesn't yet. Raises Refused."""
        if waiter.number:
            return
        if call.headers.get(COLD, "").lower() == "refuse":
            sentence = f"{route.name} is {route.state}, and the call does not wait ({COLD})"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise Refused(status, sentence, "model_starting", route.start_s or 1.0)
        first = not self.hold.waiting(waiter.model)
        if (why := self.hold.enter(waiter, route)) is not None:
            raise why
        if first and route.state == "cold":
            self._want(route.name)

    async def _turn(self, call: Call, waiter: Waiter, seconds: float) -> None:
        """Wait for news of the route, so long at most. Raises Gone."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[waiter] = turn
        call.connection.on_lost = lambda: None if turn.done() else turn.set_result(None)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except TimeoutError:
            pass  # no news
        finally:
            del self._turns[waiter]
            call.connection.on_lost = _nothing
        call.check()

    async def _relay(
        self,
        call: Call,
        upstream: Upstream,
        model: str,
        own: list[tuple[bytes, bytes]],
    ) -> None:
        """The call, then the answer. Raises Refused before the answer has begun; or Gone.

        model: empty for the server.
        """
        call.connection.on_lost = upstream.abort
        try:
            upstream.send(call.method, *call.asking)
            call.asking = NOTHING  # a stream may last for hours
            try:
                head = await upstream.head
            except Broken as error:
                call.check()
                sentence = f"{model or 'the server'} broke off before it answered: {error}"
                status = HTTPStatus.SERVICE_UNAVAILABLE
                raise Refused(status, sentence, "deployment_ended", 1.0) from error
            if call.beats and not (head.status == 200 and isinstance(upstream.framing, Chunked)):
                raise await error_of(head, upstream)
            if call.quotas and head.status == HTTPStatus.TOO_MANY_REQUESTS:
                why = await error_of(head, upstream)
                code = QUOTA_CODE if QUOTA_WORDS in str(why) else why.code
                raise Refused(why.status, str(why), code, 1.0)
            if not call.beats:
                if isinstance(upstream.framing, Unframed):
                    call.cycle.keep_alive = False
                call.begin(head, own)
            await call.pass_on(upstream)
            self.metrics.relayed.inc(upstream.passed)
            self.metrics.requests.labels(model, head.status).inc()
            call.end(upstream, head.events)
        finally:
            call.connection.on_lost = _nothing
            upstream.abort()


def _cut(call: Call, why: Denied) -> None:
    """Let the call go on no more."""
    call.cut = _refused(why)
    call.connection.on_lost()  # what it waits for


def _refused(denied: Denied) -> Refused:
    return Refused(denied.status, denied.message, denied.code)


def _listed(name: str, route: Route) -> dict[str, Any]:
    """As OpenAI lists a model; and what ours is like."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "kvmig",
        "kvmig": {"state": route.state, "start_s": route.start_s},
    }


def _starting(route: Route, waiter: Waiter, now: float) -> str:
    if route.why:
        return f"{route.state}: {route.why}"
    left = left_s(route, waiter, now)
    return "starting" if left is None else f"starting, {left} s left"


async def _connect(path: str) -> Upstream | None:
    """To a deployment; None if it isn't there."""
    loop = asyncio.get_running_loop()
    try:
        _, upstream = await loop.create_unix_connection(Upstream, path)
    except OSError:
        return None
    return upstream


def _passed(call: Call, dropped: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """The call's headers that go on. dropped: beginnings of some that don't."""
    every: list[tuple[bytes, bytes]] = call.scope["headers"]
    return [one for one in every if one[0] not in NOT_PASSED and not one[0].startswith(dropped)]
