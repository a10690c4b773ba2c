"""The clients' entry: a key, a model, a route; then the call's bytes go to the model's deployment.

A model that is not there yet is wanted from the server, and the call is held meanwhile
(`activator`). What a key allows is asked of `admission`, from a call's head on and after each of
its waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import msgspec
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import MutableHeaders
from starlette.types import Receive, Scope, Send

from kvmig.accounts.keys import (
    NO_MODEL,
    QUOTA_CODE,
    KeyDenied,
    KeyGrant,
    no_model,
    quota_code,
)
from kvmig.accounts.keys import Scope as KeyScope
from kvmig.accounts.limits import AccountTallies, LimitExceeded, RequestLimiter, headers
from kvmig.asgi import request_body as gateway
from kvmig.asgi.answer_writers import HEADER as WRITERS
from kvmig.asgi.body_bounds import ROOM, ModelReach
from kvmig.asgi.body_budget import BodyBudget
from kvmig.asgi.call_work import sequences_of
from kvmig.asgi.priority import PRIORITY
from kvmig.asgi.problems import NOT_TAKEN_HEADER
from kvmig.asgi.request_body import BodyRules, check_whole, rules_of
from kvmig.asgi.route_table import LIVE_PATH
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import BODIES, HttpConfig
from kvmig.process.unix_connections import connect_unix
from kvmig.proxy.activator import (
    STAYS,
    CountedRequest,
    ForwardCall,
    PendingRequest,
    PendingRequests,
    RequestCounts,
    WaitForRoute,
    decide,
    drawn,
)
from kvmig.proxy.admission import AdmittedCall, CallAdmission
from kvmig.proxy.call import (
    MOST_KEPT,
    NOTHING,
    ClientGone,
    ProxiedCall,
    on_lost_nothing,
    serve_call,
)
from kvmig.proxy.calls import CallBody, CallTarget, asked, body_of, check_encoding, target
from kvmig.proxy.cross_origin import CrossOrigin
from kvmig.proxy.directory import FoundModel, ModelDirectory
from kvmig.proxy.door_trace import DoorTrace
from kvmig.proxy.exposition import merged, parsed
from kvmig.proxy.messages import ModelDemand, ModelRoute, RouteChanges, SpentLimits, Told
from kvmig.proxy.metrics import DoorMetrics
from kvmig.proxy.near_names import near_names
from kvmig.proxy.page_calls import (
    FORM_BYTES,
    PAGES,
    VISIT_S,
    LoginRedirect,
    PageEntry,
    VisitorCall,
    is_page,
    too_slow,
)
from kvmig.proxy.priority_choice import ChosenPriority, choose_class
from kvmig.proxy.refusals import CallNotTaken, ProxyRefusal, bad, refused
from kvmig.proxy.relay import (
    OWN,
    AnswerHead,
    ChunkedFraming,
    CloseFraming,
    UpstreamCall,
    UpstreamProtocolError,
    error_of,
)
from kvmig.proxy.shown_routes import shown_row, shown_start
from kvmig.tracing.calls import CallTracer

FLEET = "/kvmig/"
"""Prefix of the paths that the server answers."""
LOGIN = "/kvmig/v2/login"
"""The server's one path without a key."""
LOGIN_BYTES = 1 << 16
"""Bytes of a body there, and of a form of the page, at most."""
PEOPLE = "people"
"""Account of the bodies of all calls without a key; no user's id is like it."""
GREETING = msgspec.json.encode(
    {
        "what": "the entry point of a kvmig fleet: an OpenAI API, for programs",
        "models": "/v1/models",
        "page": PAGES,
        "key": "authorization: Bearer kv-...",
    }
)
"""The page for browsers."""
FIGURES = b"/kvmig/v2/metrics"
COLD = "x-kvmig-cold"
COLD_MS = b"x-kvmig-cold-start-ms"
ACCOUNT = b"x-kvmig-account"
TENANT = b"x-kvmig-tenant"
QUOTA = b"x-kvmig-quota"
KVMIG = b"x-kvmig-"
NOT_TAKEN = NOT_TAKEN_HEADER.encode()
KEY_HEADERS = (b"authorization", b"x-api-key", b"cookie", b"x-csrf-token")
"""Headers that say who calls: no deployment gets them."""
NOT_PASSED = OWN | {
    b"content-length", b"expect", b"forwarded", b"transfer-encoding", b"x-real-ip",
}  # fmt: skip
FORWARDED = b"x-forwarded-"
SWEEP_S = 0.5
"""Pause between two looks for calls whose keys have expired."""
ORDER_S = 0.5
"""Wait for the server's answer to a call whose key it has revoked: an order may be its own end."""
CONNECT_S = 1.0
"""Timeout of one try to connect to a deployment; a call waits for its turn after it."""
LOOK_S = 5.0
"""Pause between two looks at the route of a deployment that has not begun its answer."""
RESPONSES = "/v1/responses"


class ProxyApp:
    """The proxy's ASGI application. Serve it by `DoorConnection` only."""

    def __init__(
        self,
        directory: ModelDirectory,
        config: HttpConfig,
        api: str,
        want: Callable[[str], None],
        age_s: Callable[[], float] = lambda: 0.0,
        clock: TimeSource = monotonic,
        wall: TimeSource = time.time,
        number: int = 0,
        tallies: AccountTallies | None = None,
        cross_origin: CrossOrigin | None = None,
        traces: CallTracer | None = None,
    ) -> None:
        """api: path of the server's HTTP socket. want: asks the server for a cold model.

        age_s: of what is known. wall: Unix time. number: of the proxy, among those that share the
        port. tallies: of all these; None: it is alone. cross_origin: which web pages may call;
        None: none. traces: makes the spans of calls for models; None: there are none.
        """
        self.directory = directory
        self.config = config
        self.budget = BodyBudget(BODIES * config.max_body)
        self.hold = PendingRequests(self.budget.most // 2)
        self.kept = BodyBudget(MOST_KEPT)
        self.counts = RequestCounts()
        self.metrics = DoorMetrics(self.counts, age_s)
        self.admission = CallAdmission(directory, clock, wall, tallies)
        self._number = number
        self._traces = traces
        self._cross_origin = cross_origin or CrossOrigin()
        self._api = api
        self._want = want
        self._clock = clock
        self._closed = False
        self._turns: dict[PendingRequest, asyncio.Future[None]] = {}
        self._pages = PageEntry(directory, clock, wall)
        self._sweeping: asyncio.TimerHandle | None = None

    # -- what the server tells, and hears

    def apply(self, message: Told) -> None:
        """Apply a message of the server: calls that waited for it go on in their order, and those
        that are no longer allowed end."""
        if isinstance(message, SpentLimits):
            self.admission.take_spent(message)
            return
        for model in self.directory.apply(message):
            self._wake(model)
        if not isinstance(message, RouteChanges):
            self.admission.review()
            if self.admission.calls:
                self._sweep_soon()

    def wishes(self) -> list[str]:
        """Cold models that are waited for."""
        routes = self.directory.routes
        return [one for one in self.hold.models() if one in routes and routes[one].state == "cold"]

    def demands(self) -> tuple[ModelDemand, ...]:
        """What there was to do since the last call."""
        return self.counts.demands(self._clock())

    def figures(self) -> bytes:
        """The metrics of this proxy, as Prometheus reads them."""
        own = generate_latest(self.metrics.registry).decode()
        return merged([parsed(({"proxy": str(self._number)}, own))])

    def close(self) -> None:
        """Hold no call any more: the proxy stops."""
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
        call = ProxiedCall(scope, receive, send)
        if self._is_for_pages(call):
            call.cross_origin = self._cross_origin.answer_headers(call.headers)
        try:
            await serve_call(call, self._serve, partial(self._note_status, call))
        finally:
            if call.trace is not None:
                call.trace.end(gone=call.gone)

    def _note_status(self, call: ProxiedCall, status: int) -> None:
        self.count_refused(status)
        if call.trace is not None:
            call.trace.status = status

    async def _serve(self, call: ProxiedCall) -> None:
        if call.path == "/health":
            there = self.directory.version >= 0 and not self._closed
            await call.answer(HTTPStatus.OK if there else HTTPStatus.SERVICE_UNAVAILABLE, b"")
        elif call.path == LIVE_PATH:
            await call.answer(HTTPStatus.OK, b"")
        elif call.method == "GET" and call.path == "/":
            if "text/html" in call.headers.get("accept", ""):
                await call.answer(HTTPStatus.SEE_OTHER, b"", headers={"location": PAGES})
            else:
                await call.answer(HTTPStatus.OK, GREETING)
        elif call.connection.too_many:
            call.limits = [(b"connection", b"close")]
            sentence = "this proxy has as many clients as its open files are for (ulimit -Hn)"
            raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "proxy_full", 1.0)
        elif self._is_for_pages(call) and self._cross_origin.is_preflight(
            call.method, call.headers
        ):
            await self._answer_preflight(call)
        elif call.path == LOGIN:
            self._pages.charge_visitor(call.address)
            await self._log_in(call)
        elif is_page(call.path):
            await self._serve_page(call)
        else:
            await self._let_in(call)

    def _is_for_pages(self, call: ProxiedCall) -> bool:
        own = call.path.startswith(FLEET) or is_page(call.path)
        return not own and call.path != "/metrics"

    async def _serve_page(self, call: ProxiedCall) -> None:
        """A browser's call, which has a session in place of a key. Raises ProxyRefusal."""
        way = self._pages.judge(
            call.method, call.path, call.scope["query_string"], call.headers, call.address
        )
        if isinstance(way, LoginRedirect):
            await call.answer(HTTPStatus.SEE_OTHER, b"", headers={"location": way.location})
        elif isinstance(way, VisitorCall):
            await self._log_in(call)
        else:
            call.session_key, call.path = way.prefix, way.path
            with self._pages.open.entered(way):
                await self._let_in(call)

    async def _answer_preflight(self, call: ProxiedCall) -> None:
        """A browser asks, without a key, whether a page may call."""
        if not self._cross_origin.allows(call.headers):
            sentence = "pages of this origin may not call (kvmig up --allowed-origins)"
            raise ProxyRefusal(HTTPStatus.FORBIDDEN, sentence, "origin_not_allowed")
        call.cross_origin += self._cross_origin.preflight_headers(call.headers)
        await call.answer(HTTPStatus.NO_CONTENT, b"")

    async def _let_in(self, call: ProxiedCall) -> None:
        """Raises ProxyRefusal, 401 or 403, for a key that isn't good for the call."""
        scope: KeyScope | None = "infer"
        if call.path.startswith(FLEET) or is_page(call.path):
            scope = None
        elif call.path == "/metrics":
            scope = "admin"
        prefix, known = call.session_key, self.directory
        visit = self.admission.enter(
            known.current(prefix) if prefix else known.grant(call.key),
            call.address,
            scope,
            lambda why: call.cut_off(refused(why)),
        )
        if isinstance(visit, KeyDenied):
            raise refused(visit)
        self._sweep_soon()
        try:
            if scope is None:
                await self._ask_server(call, visit)
            elif scope == "admin":
                await self._tell_figures(call)
            else:
                where = asked(call.method, call.path)
                if where.route is None:
                    await self._list(call, visit, where)
                else:
                    call.api = where.route.api
                    await self._infer(call, visit, where)
        finally:
            self.admission.end_call(visit)

    def _sweep_soon(self) -> None:
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        if self.admission.end_expired():
            self._sweep_soon()

    async def _list(self, call: ProxiedCall, visit: AdmittedCall, where: CallTarget) -> None:
        grant = self.directory.current(visit.prefix)
        assert grant is not None  # nothing was waited for
        rows = {name: shown_row(name, route) for name, route in self.directory.names(grant)}
        if where.model is not None:
            if where.model not in rows:
                raise refused(no_model(where.model))
            rows = {where.model: rows[where.model]}
        if not where.listed:
            answer: dict[str, Any] = {"object": "list", "data": list(rows.values())}
        elif where.listed in rows:
            answer = rows[where.listed]
        else:
            raise refused(no_model(where.listed))
        await call.answer(HTTPStatus.OK, msgspec.json.encode(answer))

    async def _read(self, call: ProxiedCall, visit: AdmittedCall | None, rules: BodyRules) -> bytes:
        """The call's body, which takes room of the key's user until it is written to a deployment.

        Raises ClientGone, ProxyRefusal, or the front end's HttpRejection.
        """
        grant = None if visit is None else self.directory.current(visit.prefix)
        headers = MutableHeaders(raw=call.scope["headers"])
        account = PEOPLE if visit is None else ""
        call.body = self.budget.enter(account if grant is None else grant.user_id)
        message = await gateway.read_body(rules, call.body, headers, call.receive_part)
        if message is None:
            raise ClientGone
        return cast("bytes", message["body"])

    # -- to the server

    async def _tell_figures(self, call: ProxiedCall) -> None:
        """The whole fleet's, from the server; without a server this proxy's own."""
        headers = [
            (b"x-forwarded-for", call.address.encode()),
            (b"authorization", b"Bearer " + call.key.encode()),
        ]
        call.set_request(FIGURES, headers, b"")
        upstream = await _connect(self._api)
        if upstream is None:
            await call.answer(HTTPStatus.OK, self.figures(), CONTENT_TYPE_LATEST)
        else:
            await self._relay(call, upstream, "", [])

    async def _log_in(self, call: ProxiedCall) -> None:
        """A person without a key, or without a session, asks the server."""
        why = "a login needs no more"
        rules = BodyRules(LOGIN_BYTES, self.config.body_timeout_s, None, why, LOGIN_BYTES)
        content = await self._read(call, None, rules)
        with self._pages.visits.entered(call.path):
            cutting = asyncio.get_running_loop().call_later(VISIT_S, call.cut_off, too_slow())
            try:
                await self._pass_order(call, content)
            finally:
                cutting.cancel()

    async def _ask_server(self, call: ProxiedCall, visit: AdmittedCall) -> None:
        most = min(FORM_BYTES if is_page(call.path) else ROOM, self.config.max_body)
        why = "an order to the server needs no more"
        rules = BodyRules(most, self.config.body_timeout_s, None, why, self.config.max_body)
        content = await self._read(call, visit, rules)
        call.patience_s = ORDER_S
        await self._pass_order(call, content)

    async def _pass_order(self, call: ProxiedCall, content: bytes) -> None:
        headers = _passed(call, (FORWARDED, KVMIG))
        headers.append((b"x-forwarded-for", call.address.encode()))
        call.set_request(target(call.path, call.scope["query_string"]), headers, content)
        upstream = await _connect(self._api)
        if upstream is None:
            sentence = "the fleet's server is not there, try again"
            raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "server_away", 1.0)
        await self._relay(call, upstream, "", [])

    # -- to a model

    async def _infer(self, call: ProxiedCall, visit: AdmittedCall, where: CallTarget) -> None:
        self._check_limits(
            call, visit, *self.admission.check_limits(visit)
        )  # before it uploads its body
        if self._traces is not None and where.route is not None:
            call.trace = DoorTrace.begin(
                self._traces, where.route, call.scope["headers"], call.call_id, visit.prefix
            )
        waiter = await self._prepare(call, visit, where)
        if call.trace is not None:
            call.trace.name_model(waiter.model)
        self._check_limits(call, visit, *self.admission.begin(visit, waiter.sequences))
        counts = (
            self.counts if waiter.works else RequestCounts()
        )  # what doesn't work keeps no model up
        counted = CountedRequest(counts, waiter.model)
        try:
            while True:
                upstream = await self._reach(call, waiter, counted)
                if not call.background:  # one counts as long as the deployment works for it
                    upstream.before_last = partial(self.admission.end_requests, visit)
                self._make_request(call, visit, waiter.account)
                try:
                    await self._relay(call, upstream, waiter.model, self._cold_start(waiter))
                except CallNotTaken:
                    call.hang_up = None
                    waiter.leave_queue(self._clock())
                else:
                    return
        finally:
            call.drop_errand()
            counted.set_state("over", self._clock())

    def _check_limits(
        self,
        call: ProxiedCall,
        visit: AdmittedCall,
        exceeded: LimitExceeded | None,
        limiters: Sequence[RequestLimiter],
    ) -> None:
        """Raises ProxyRefusal: 429, or 400 for a call that never may come in."""
        call.limits = headers(limiters, self._clock(), self.admission.quotas_left(visit))
        if exceeded is not None:
            if exceeded.again_s is None:
                raise bad(exceeded.sentence, "too_many_sequences")
            status = HTTPStatus.TOO_MANY_REQUESTS
            raise ProxyRefusal(status, exceeded.sentence, "rate_limit_exceeded", exceeded.again_s)

    async def _prepare(
        self, call: ProxiedCall, visit: AdmittedCall, where: CallTarget
    ) -> PendingRequest:
        """Know what the call asks for. Raises ProxyRefusal, or ClientGone."""
        assert where.route is not None
        is_form = where.route.model == "form"
        charged = where.route.charge != "nothing"
        check_encoding(call.headers)
        if where.answer_id:  # what head and path decide needs no body
            self._find_answer(visit, where)
        elif where.model is not None:
            self._find_model(call, visit, where.model, charged)
        self._check_named_class(call, visit, where)
        reach = self._reach_before(visit, where)
        rules = rules_of(self.config, reach, where.route, call.headers)
        body = body_of(await self._read(call, visit, rules), call.headers, is_form=is_form)
        if where.answer_id:
            grant, found = self._find_answer(visit, where)
        else:
            name = where.model or body.model
            grant, found = self._find_model(call, visit, name, charged)
        if (known := self.directory.routes[found.model].card.reach) != reach:
            own = rules_of(self.config, known, where.route, call.headers)
            check_whole(own, body.content)
        more = {}
        if where.path == RESPONSES:
            self._check_previous(body.previous, grant, found.model)
            more["request_id"] = self.directory.new_answer_id(grant, found.model)
            call.background = body.background
        content = body.naming(found.served, **more)
        passed = _passed(call, (FORWARDED, KVMIG, *KEY_HEADERS))
        if body.form is not None:
            passed = [one for one in passed if one[0] != b"content-type"]
            passed.append((b"content-type", body.form.content_type))
        passed.append((ACCOUNT, grant.key_id.encode()))
        passed.append((TENANT, grant.user_id.encode()))
        if call.session_key:
            passed.append((WRITERS.encode(), b"1"))
        chosen = self._choose_class(call, body, found.model, grant)
        if chosen.runs_as is not None:
            passed = [one for one in passed if one[0] != PRIORITY.encode()]
            passed.append((PRIORITY.encode(), str(chosen.runs_as).encode()))
        call.errand = (target(where.path, call.scope["query_string"]), passed, content)
        return PendingRequest(
            model=found.model,
            priority=chosen.waits_as,
            size=len(content),
            since=self._clock(),
            beats=body.stream,
            works=where.route.works,
            draw=self._draw(call, where),
            sequences=sequences_of(where.route, content),
            account=grant.user_id,
        )

    def _draw(self, call: ProxiedCall, where: CallTarget) -> int:
        """Decides which of two deployments gets the call. One that stores its answer, or asks for
        one, stays: answers are not at the new one."""
        stored = where.path == RESPONSES or where.answer_id
        return STAYS if stored else drawn(call.call_id)

    def _reach_before(self, visit: AdmittedCall, where: CallTarget) -> ModelReach | None:
        """What of the body is of use, as far as that can be known before it is there."""
        grant = self.directory.current(visit.prefix)
        return None if grant is None else self.directory.reach(grant, where.model)

    def _find_model(
        self, call: ProxiedCall, visit: AdmittedCall, name: str | None, charged: bool
    ) -> tuple[KeyGrant, FoundModel]:
        """Raises ProxyRefusal."""
        if not name:
            sentence = "model is missing: the body names it, or the path as in /models/NAME/v1/..."
            raise bad(sentence, "model_missing")
        found = self.directory.find(name, call.call_id)
        model = None if found is None else found.model
        grant = self.admission.name_model(visit, name, model, charged)
        if isinstance(grant, KeyDenied) or found is None:
            raise self._denied(
                visit, name, grant if isinstance(grant, KeyDenied) else no_model(name)
            )
        return grant, found

    def _denied(self, visit: AdmittedCall, name: str, denied: KeyDenied) -> ProxyRefusal:
        """The refusal; of an unknown name, with near ones that the key may use."""
        grant = self.directory.current(visit.prefix)
        if grant is None or denied.code != NO_MODEL:
            return refused(denied)
        near = near_names(name, (known for known, _ in self.directory.names(grant)))
        more = f"; near it: {', '.join(near)}" if near else ""
        return ProxyRefusal(denied.status, denied.message + more, denied.code)

    def _find_answer(self, visit: AdmittedCall, where: CallTarget) -> tuple[KeyGrant, FoundModel]:
        """The model that has it, if it is there: answers end with their deployment."""
        key = self.directory.current(visit.prefix)
        model = None if key is None else self.directory.model_of_answer(where.answer_id, key)
        route = None if model is None else self.directory.routes.get(model)
        if route is None or route.state != "ready":
            raise _no_answer(where.answer_id)
        if where.model is not None and route.name not in self.directory.models_of(where.model):
            raise _no_answer(where.answer_id)
        grant = self.admission.name_model(visit, None, route.name, charged=False)
        if isinstance(grant, KeyDenied):
            raise refused(grant)
        return grant, FoundModel(route.name, route.served or route.name)

    def _check_previous(self, previous: str | None, grant: KeyGrant, model: str) -> None:
        """Raises ProxyRefusal for an answer to go on from that isn't this user's and model's."""
        if previous and self.directory.model_of_answer(previous, grant) != model:
            sentence = f"previous_response_id: no response {previous[:150]!r}"
            raise ProxyRefusal(HTTPStatus.NOT_FOUND, sentence, "previous_response_not_found")

    def _make_request(self, call: ProxiedCall, visit: AdmittedCall, account: str) -> None:
        """Ask the deployment, with what holds for the key at this moment."""
        assert call.errand is not None
        path, passed, content = call.errand
        call.keep_errand(self.kept, account)
        call.granted = self.admission.has_quota(visit)
        if call.granted:
            passed = [*passed, (QUOTA, b"1")]
        if call.trace is not None:
            passed = call.trace.replace_headers(passed)
        call.set_request(path, passed, content)

    def _choose_class(
        self, call: ProxiedCall, body: CallBody, model: str, grant: KeyGrant
    ) -> ChosenPriority:
        """Raises ProxyRefusal for a class that the model doesn't have, or the key may not use."""
        route = self.directory.routes.get(model)
        if route is None:
            return ChosenPriority(0)
        named = call.headers.get(PRIORITY)
        return choose_class(route.classes, route.priority, grant.classes, named, body.priority)

    def _check_named_class(self, call: ProxiedCall, visit: AdmittedCall, where: CallTarget) -> None:
        """Raises ProxyRefusal for a class in the head that the key may not use, or that none of the
        models has which the call may be for."""
        named, grant = call.headers.get(PRIORITY), self.directory.current(visit.prefix)
        if named is None or grant is None or where.answer_id:
            return
        refusal: ProxyRefusal | None = None
        for route in self.directory.routes_of(grant, where.model):
            try:
                choose_class(route.classes, route.priority, grant.classes, named, None)
            except ProxyRefusal as error:
                refusal = error
            else:
                return
        if refusal is not None:
            raise refusal

    def _cold_start(self, waiter: PendingRequest) -> list[tuple[bytes, bytes]]:
        if not waiter.number:
            return []
        held_s = self._clock() - waiter.since
        self.metrics.cold_start.labels(waiter.model).observe(held_s)
        return [(COLD_MS, b"%d" % (held_s * 1e3))]

    async def _reach(
        self, call: ProxiedCall, waiter: PendingRequest, counted: CountedRequest
    ) -> UpstreamCall:
        """A connection to the model's deployment, once there. Raises ProxyRefusal, ClientGone."""
        try:
            while True:
                if self._closed:
                    sentence = "the proxy is stopping, try again"
                    raise ProxyRefusal(HTTPStatus.SERVICE_UNAVAILABLE, sentence, "stopping", 1.0)
                route = self.directory.routes.get(waiter.model)
                match decide(route, waiter, self._clock()):
                    case ForwardCall(socket):
                        # Before anything of it is on its way.
                        counted.set_state("running", self._clock(), socket)
                        upstream = await _connect(socket)
                        if upstream is not None and not call.gone and call.cut is None:
                            return upstream
                        if upstream is not None:
                            upstream.abort()
                        call.check()
                        waiter.tried = self._clock()
                    case WaitForRoute(seconds, beat):
                        assert route is not None
                        self._stay(call, waiter, route)
                        counted.set_state("held", self._clock())
                        if call.trace is not None:
                            call.trace.hold(route.state)
                        if beat:
                            waiter.beaten = self._clock()
                            call.send_keepalive(shown_start(route, waiter, self._clock()))
                        await self._turn(call, waiter, seconds)
                    case ProxyRefusal() as why:
                        raise why
        finally:
            self.hold.remove_request(waiter)
            if call.trace is not None:
                call.trace.end_hold()

    def _stay(self, call: ProxiedCall, waiter: PendingRequest, route: ModelRoute) -> None:
        """Queue the request, if it isn't queued yet. Raises ProxyRefusal."""
        if waiter.number:
            return
        if call.headers.get(COLD, "").lower() == "refuse":
            sentence = f"{route.name} is {route.state}, and the call does not wait ({COLD})"
            status = HTTPStatus.SERVICE_UNAVAILABLE
            raise ProxyRefusal(status, sentence, "model_starting", route.start_s or 1.0)
        first = not self.hold.waiting(waiter.model)
        if (why := self.hold.enter(waiter, route)) is not None:
            raise why
        if first and route.state == "cold":
            self._want(route.name)

    async def _turn(self, call: ProxiedCall, waiter: PendingRequest, seconds: float) -> None:
        """Wait for news of the route, for a limited time. Raises ClientGone."""
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
            call.connection.on_lost = on_lost_nothing
        call.check()

    async def _head(self, upstream: UpstreamCall, model: str) -> AnswerHead:
        """The head of the answer.

        Raises UpstreamProtocolError, and ProxyRefusal where the deployment hangs: its route has not
        been ready for as long as a start may take.
        """
        since: float | None = None
        while not upstream.head.done():
            await asyncio.wait((upstream.head,), timeout=LOOK_S)
            route = self.directory.routes.get(model)
            if route is None or route.state != "starting":
                since = None
                continue
            since = self._clock() if since is None else since
            if self._clock() - since >= route.start_timeout_s:
                sentence = f"{model} has not served for {route.start_timeout_s:g} s, try again"
                status = HTTPStatus.SERVICE_UNAVAILABLE
                raise ProxyRefusal(status, sentence, "deployment_silent", route.start_s or 1.0)
        return await upstream.head

    async def _relay(
        self,
        call: ProxiedCall,
        upstream: UpstreamCall,
        model: str,
        own: list[tuple[bytes, bytes]],
    ) -> None:
        """The call, then the answer. Raises ProxyRefusal before the answer has begun; ClientGone.

        model: empty for the server.
        """
        try:
            await self._pass_answer(call, upstream, model, own)
            if call.background:  # it counts as long as the deployment works for it
                await upstream.closed
        finally:
            upstream.abort()

    async def _pass_answer(
        self,
        call: ProxiedCall,
        upstream: UpstreamCall,
        model: str,
        own: list[tuple[bytes, bytes]],
    ) -> None:
        """See `_relay`. Raises CallNotTaken for a call that may go to another deployment."""
        call.connection.on_lost = call.hang_up = upstream.abort
        try:
            upstream.send(call.method, *call.asking, written=call.give_body_back)
            call.asking = NOTHING  # a stream may last for hours
            try:
                head = await self._head(upstream, model)
            except UpstreamProtocolError as error:
                call.check()
                sentence = f"{model or 'the server'} broke off before it answered: {error}"
                status = HTTPStatus.SERVICE_UNAVAILABLE
                raise ProxyRefusal(status, sentence, "deployment_ended", 1.0) from error
            if head.get(NOT_TAKEN) and call.errand is not None:
                raise CallNotTaken
            call.drop_errand()
            if call.beats and not (
                head.status == 200 and isinstance(upstream.framing, ChunkedFraming)
            ):
                raise await error_of(head, upstream)
            if call.granted and head.status == HTTPStatus.TOO_MANY_REQUESTS:
                why = await error_of(head, upstream)
                code = quota_code(str(why)) or why.code
                again_s = None if code == QUOTA_CODE else 1.0
                raise ProxyRefusal(why.status, str(why), code, again_s)
            if not call.beats:
                if isinstance(upstream.framing, CloseFraming):
                    call.cycle.keep_alive = False
                call.begin(head, own)
            if call.background:
                call.connection.on_lost = upstream.lose_client
            await call.pass_on(upstream)
            self.metrics.relayed.inc(upstream.passed)
            self.metrics.requests.labels(model, head.status).inc()
            if call.trace is not None:
                call.trace.status = head.status
            call.end(upstream, head.events)
        finally:
            call.connection.on_lost = on_lost_nothing  # the connection's next call has its own


def _no_answer(answer_id: str) -> ProxyRefusal:
    sentence = f"no response {answer_id[:150]!r}"
    return ProxyRefusal(HTTPStatus.NOT_FOUND, sentence, "response_not_found")


async def _connect(path: str) -> UpstreamCall | None:
    """A connection to a deployment; None if it isn't there."""
    try:
        return await connect_unix(UpstreamCall, path, CONNECT_S)
    except OSError:
        return None


def _passed(call: ProxiedCall, dropped: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """The call's headers that go on. dropped: beginnings of some that don't."""
    every: list[tuple[bytes, bytes]] = call.scope["headers"]
    return [one for one in every if one[0] not in NOT_PASSED and not one[0].startswith(dropped)]
