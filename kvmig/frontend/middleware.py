"""The one middleware that every HTTP call passes before its application.

A call gets its id; then, in this order, it is refused if its client may not call, if nothing is
taken now, if its body is too large or too slow, if its priority is unknown, or if too many requests
wait already. A call that isn't let in is answered before anything of the body is kept, counted or
parsed.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

import prometheus_client
from prometheus_client import CollectorRegistry
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmig.accounts.page_sessions import PATH as PAGE
from kvmig.asgi.access import ADMIN, AccessDenied, AccessRules
from kvmig.asgi.answer_usage import UsageReader
from kvmig.asgi.answer_writers import show_writers
from kvmig.asgi.body_bounds import ModelReach, largest_size
from kvmig.asgi.body_budget import BodyBudget
from kvmig.asgi.call import CALL_ID, HttpCall, accepted, current_call
from kvmig.asgi.call_work import CallWork, work_of
from kvmig.asgi.connection import SCOPE
from kvmig.asgi.error_forms import api_of
from kvmig.asgi.error_stage import ErrorStage
from kvmig.asgi.plain_paths import plain_path
from kvmig.asgi.priority import PRIORITY, UnknownPriority, checked_body, checked_header
from kvmig.asgi.problems import NOT_TAKEN_HEADER, denial, problem, shorten_value
from kvmig.asgi.request_body import (
    RETRY_AFTER,
    UNREAD_BYTES,
    BodyRules,
    HttpRejection,
    discard,
    read_body,
    rules_of,
)
from kvmig.asgi.route_table import ClientRoute, RouteMatch, find_route
from kvmig.asgi.session_id import SessionTooLong, session_in, session_key
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import BODIES, HttpConfig
from kvmig.core.priorities import PriorityClass
from kvmig.frontend.background import OpenAnswer
from kvmig.frontend.call_spans import CallSpans, end_call
from kvmig.frontend.load_shedding import LoadShedding
from kvmig.frontend.loop_use import LARGE_BYTES, LoopUse

ACCOUNT = "x-kvmig-account"
TENANT = "x-kvmig-tenant"
QUOTA = "x-kvmig-quota"
OF_PAGE = "kvmig.page"
"""Entry of a call's ASGI scope: whether the page makes it, for the model. No client can set it."""
FORM_BYTES = 1 << 14
"""Bytes of a form of the page, at most."""
TRUNCATED = "x-kvmig-truncated"
"""Header of an answer that ends too early, with the reason."""


class PageKey(Protocol):
    """What lets calls of the page in, which have a session in place of a key."""

    def judge_call(self, method: str, headers: Mapping[str, str]) -> AccessDenied | None:
        """Why a call isn't let in; None: it is. headers: names in lower case."""
        ...

    @property
    def authorization(self) -> str:
        """The header that the engine's application asks for."""
        ...


@dataclass
class HttpState:
    """Limits, rules and counts that all calls of one front end share; `app.state.kvmig`.

    vacant, queued and overloaded: the router's and the metrics', see `LoadShedding.refusal`.
    """

    config: HttpConfig
    access: AccessRules
    priorities: Sequence[PriorityClass]
    registry: CollectorRegistry
    closed: bool = False
    """The server stops and takes no new requests."""
    vacant: Callable[[], bool] = lambda: False
    """Whether there is no instance."""
    without_engine: Callable[[], bool] = lambda: False
    """Whether no instance of this server is connected, maybe some of other servers."""
    queued: Callable[[int], int] = lambda priority: 0
    """Requests in instances' queues that aren't after this priority."""
    overloaded: Callable[[int], None] = lambda priority: None
    """Counts a call that was answered 429."""
    begin_work: Callable[[HttpCall], object] = lambda call: None
    """Called with each call that engines shall work for."""
    uncounted: Callable[[], str] = lambda: ""
    """Why no such call is taken, for it would not be counted; empty: they are."""
    clock: TimeSource = monotonic
    keyed: bool = False
    """Whether calls without a proxy's word have keys of their own."""
    reach: ModelReach | None = None
    """What the model can use; None: it isn't known, and bounds nothing."""
    traces: CallSpans | None = None
    """Makes the spans of calls that engines work for; None: there are none."""
    page: PageKey | None = None
    """Judges calls of the page for the model; None: there is no page."""
    session_secret: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    """Key of the hashes that stand for clients' sessions."""
    budget: BodyBudget = field(init=False)
    """Room for bodies of calls whose prompts the engine doesn't have yet."""
    shedding: LoadShedding = field(init=False)
    loop_use: LoopUse = field(init=False)
    _refused: prometheus_client.Counter = field(init=False)

    def __post_init__(self) -> None:
        self.budget = BodyBudget(BODIES * self.config.max_body)
        self.shedding = LoadShedding(self.config.max_waiting)
        self.loop_use = LoopUse(self.clock)
        self._refused = prometheus_client.Counter(
            "kvmig_http_refused_total",
            "Calls that were answered with an error of the client's, by status: 401 and 403 "
            "(not allowed), 408 and 431 (slow or too large heads, slow bodies), 413, 422, ...",
            ("status",),
            registry=self.registry,
        )

    def learn(self, reach: ModelReach) -> None:
        """Bound bodies by what the model can use, too, from now on."""
        self.reach = reach
        self.budget.most = BODIES * min(self.config.max_body, largest_size(reach))

    def body_rules(self, path: str, found: RouteMatch | None, headers: MutableHeaders) -> BodyRules:
        """What holds for the body of such a call. Forms of the page come before any key is known:
        they neither fill the room for bodies nor hold the event loop up."""
        if self.access.is_for_page(path):
            why = "a form of the page needs no more"
            return BodyRules(FORM_BYTES, self.config.body_timeout_s, None, why, UNREAD_BYTES)
        route = None if found is None else found.route
        return rules_of(self.config, self.reach, route, headers)

    def payer(self, call: HttpCall, headers: MutableHeaders) -> str:
        """The account whose part of the room a call's body takes; empty: unknown."""
        _, _, given = headers.get("authorization", "").partition(" ")
        if call.tenant or not self.keyed or not given:
            return call.tenant
        return f"key {hashlib.blake2b(given.encode(), digest_size=8).hexdigest()}"

    def session_name(self, session: str, account: str = "") -> int | None:
        """What stands for a session of that id: of an account, or of whichever."""
        return session_key(self.session_secret, account, session)

    def account(self, headers: MutableHeaders) -> str:
        """The key that a call counts for, as a proxy names it; on a port none is believed."""
        return headers.get(ACCOUNT, "") if self.config.uds else ""

    def tenant(self, headers: MutableHeaders) -> str:
        """The user whose key that is, in the same way."""
        return headers.get(TENANT, "") if self.config.uds else ""

    def quota(self, headers: MutableHeaders) -> bool:
        """Whether that key has a quota."""
        return bool(self.config.quota_socket and self.config.uds and headers.get(QUOTA))

    def count(self, status: int) -> None:
        """Count an answer that begins, if it is an error of the client's."""
        if 400 <= status < 500:
            self._refused.labels(str(status)).inc()


class HttpMiddleware:
    """Pure ASGI, outside of the engine's application. `app.state.kvmig`: its `HttpState`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        state: HttpState = scope["app"].state.kvmig
        scope["path"] = plain_path(scope["path"], scope.get("root_path", ""))
        # A copy: the server's own list stays as it came.
        headers = MutableHeaders(raw=list(scope["headers"]))
        scope[OF_PAGE] = state.page is not None and enter_from_page(scope)
        call = scope[SCOPE] = HttpCall(
            accepted(headers.get(CALL_ID)),
            state.account(headers),
            state.tenant(headers),
            quota=state.quota(headers),
        )
        headers[CALL_ID] = call.call_id
        call.writers, send = show_writers(headers, send)

        answer = CountedAnswer(state, call, usage_reader(scope), send)
        token = current_call.set(call)
        try:
            inner = {**scope, "headers": headers.raw}
            if scope["type"] == "websocket":
                await self.app(inner, receive, answer.send)
            else:
                # A call with an account comes from a fleet's door.
                worded = bool(call.account)
                stage = ErrorStage(api_of(route_path(scope)), call, answer.send, worded=worded)
                await self._serve(state, call, inner, headers, receive, stage)
                await answer.end.wait(receive)
        finally:
            if call.account:
                call.end_background()
            current_call.reset(token)
            call.end_call()
            if call.trace is not None:
                end_call(call.trace, call)

    async def _serve(
        self,
        state: HttpState,
        call: HttpCall,
        scope: Scope,
        headers: MutableHeaders,
        receive: Receive,
        stage: ErrorStage,
    ) -> None:
        path = route_path(scope)
        found = find_route(scope["method"], path)
        payer = state.payer(call, headers)
        try:
            if state.page is not None and scope[OF_PAGE]:
                check_denied(state.page.judge_call(scope["method"], headers), headers)
                headers["authorization"] = state.page.authorization
            else:
                version = scope.get("http_version", "")
                check_denied(state.access.denied(scope["method"], path, headers, version), headers)
            check_engine(state, path)
            if scope["method"] == "POST":
                check_open(state, scope["path"])
                check_stalls(state, payer)
            call.payer = payer
            call.body = state.budget.enter(payer)
            rules = state.body_rules(path, found, headers)
            message = await read_body(rules, call.body, headers, receive)
            if message is None:
                return  # the client has left
            priority, sequences = 0, 1
            if scope["method"] == "POST":
                message, priority = check_priority(state, headers, message)
                call.priority = priority if PRIORITY in headers else None
            if found is not None and found.route.works:
                check_counted(state)
                work = check_work(state, found.route, message["body"])
                sequences = work.sequences
                session = check_session(headers) or work.session
                call.session = session_key(state.session_secret, payer, session)
                call.session_name = state.session_name(session)
                check_load(state, priority, call.account, sequences)
        except HttpRejection as refused:
            if refused.unread and "expect" not in headers:
                # Whoever asks before sending hasn't sent it yet.
                await discard(receive, refused.unread)
            await refused.answer(scope, receive, stage.send)
            return
        if found is not None and found.route.works:
            if state.traces is not None:
                call.trace = state.traces.begin(call, found.route, headers.raw)
                call.trace.replace_headers(headers.raw)
            state.begin_work(call)
            shedding, clock, account = state.shedding, state.clock, call.account
            call.enter(lambda by: shedding.hold(priority, by, clock(), account), sequences)
        timed = payer if len(message["body"]) >= LARGE_BYTES else ""
        receive = first(message, receive)
        del message  # a form is read piece by piece, and not kept
        await state.loop_use.run(call, timed, stage.run(self.app, scope, receive))


class CountedAnswer:
    """Sends one call's answer, and notes its status, its use and its end."""

    def __init__(
        self, state: HttpState, call: HttpCall, reader: UsageReader | None, send: Send
    ) -> None:
        self.end = OpenAnswer(call, send)
        self._state = state
        self._call = call
        self._reader = reader
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI. A part of a stream has no coroutine of its own: each costs every token a step."""
        if message["type"] == "http.response.body":
            if self._reader is not None:
                self._reader.add_part(message.get("body", b""))
            return self._send(message) if message.get("more_body") else self._end(message)
        return (
            self._begin(message)
            if message["type"] == "http.response.start"
            else self._send(message)
        )

    async def _begin(self, message: Message) -> None:
        call, headers = self._call, MutableHeaders(scope=message)
        headers[CALL_ID] = call.call_id
        call.status = message["status"]
        if call.truncated and call.status == HTTPStatus.OK:
            headers[TRUNCATED] = call.truncated.encode("ascii", "replace").decode()
        self._state.count(call.status)
        if self._reader is not None:
            self._reader.begin(headers.get("content-type", ""))
        await self._send(message)

    async def _end(self, message: Message) -> None:
        await self.end.send(message)
        self._call.end_answer()
        self._call.told = None if self._reader is None else self._reader.read_usage()


def route_path(scope: Scope) -> str:
    """The path within the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def usage_reader(scope: Scope) -> UsageReader | None:
    """The reader of a charged call's answer; None: the call isn't charged."""
    found = None if scope["type"] != "http" else find_route(scope["method"], route_path(scope))
    charged = found is not None and found.route.charge != "nothing"
    return UsageReader(found.route.api) if found is not None and charged else None


# -- who may call, and when


def enter_from_page(scope: Scope) -> bool:
    """Whether a call is the page's for the model; then it gets the path of the API."""
    path = route_path(scope)
    own = path.removeprefix(PAGE)
    listing = (scope.get("method"), own) == ("GET", "/v1/models")
    if own == path or not (listing or find_route(scope.get("method", ""), own)):
        return False
    scope["path"] = scope.get("root_path", "") + own
    return True


def check_denied(denied: AccessDenied | None, headers: MutableHeaders) -> None:
    """Raises HttpRejection, 401 or 403, for a call that isn't allowed."""
    if denied is not None:
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        raise HttpRejection(denial(denied), UNREAD_BYTES if has_body else 0)


def check_open(state: HttpState, path: str) -> None:
    """Raises HttpRejection, 503, while the server stops or has no instance for a POST.

    An operator may look, and ask for instances, when there is none.
    """
    sentence = why_closed(state)
    operators = path.startswith(ADMIN) or state.access.is_for_page(path)
    if sentence is None or (operators and not state.closed):
        return
    headers = {**RETRY_AFTER, NOT_TAKEN_HEADER: "1"} if state.closed else RETRY_AFTER
    raise HttpRejection(problem(HTTPStatus.SERVICE_UNAVAILABLE, sentence, headers=headers))


ENGINE_CALLS = frozenset(
    f"/{word}"
    for word in (
        "collective_rpc", "finish_weight_update", "get_world_size", "init_weight_transfer_engine",
        "is_paused", "is_sleeping", "pause", "release_kv_cache_memory", "reset_encoder_cache",
        "reset_mm_cache", "reset_prefix_cache", "resume", "sleep", "start_profile",
        "start_weight_update", "stop_profile", "update_weights", "v1/load_lora_adapter",
        "v1/unload_lora_adapter", "wake_up",
    )
)  # fmt: skip
"""Paths of vLLM's whose calls go to all engines of this server."""


def check_engine(state: HttpState, path: str) -> None:
    """Raises HttpRejection, 503, for a call to this server's engines while it has none.

    Its clients' requests may run at other servers all the same.
    """
    if path in ENGINE_CALLS and state.without_engine():
        sentence = (
            f"no instance of this server is connected to run {path} on, POST {ADMIN}v1/instances"
            " starts one"
        )
        status = HTTPStatus.SERVICE_UNAVAILABLE
        raise HttpRejection(problem(status, sentence, headers=RETRY_AFTER))


def check_stalls(state: HttpState, payer: str) -> None:
    """Raise HttpRejection, 429, for an account whose calls have held up all others again and
    again."""
    if closed_s := state.loop_use.stalls.closed_s(payer, state.clock()):
        again_s = math.ceil(closed_s)
        sentence = (
            "calls of this account held up all others three times within a minute, try again in"
            f" {again_s} s"
        )
        status, answer = HTTPStatus.TOO_MANY_REQUESTS, {"Retry-After": str(again_s)}
        raise HttpRejection(problem(status, sentence, headers=answer), UNREAD_BYTES)


def check_counted(state: HttpState) -> None:
    """Raises HttpRejection, 503, while what calls use can't be kept."""
    if sentence := state.uncounted():
        status = HTTPStatus.SERVICE_UNAVAILABLE
        raise HttpRejection(problem(status, sentence, headers=RETRY_AFTER))


def why_closed(state: HttpState) -> str | None:
    """Why no call of a client is taken now; None: calls are taken."""
    if state.closed:
        return "the server is stopping and takes no new requests"
    return "no instance is there to run it" if state.vacant() else None


# -- the body


def first(message: Message, receive: Receive) -> Receive:
    """`message`, then all that `receive` gives."""
    pending = [message]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


def check_priority(
    state: HttpState, headers: MutableHeaders, message: Message
) -> tuple[Message, int]:
    """The body and the header with numbers in place of names, and the call's number.

    Raises HttpRejection, 400.
    """
    number = 0
    try:
        if "json" in headers.get("content-type", "").lower():
            body, number = checked_body(message["body"], state.priorities)
            if "content-length" in headers:
                headers["content-length"] = str(len(body))
            message = {**message, "body": body}
        if (given := headers.get(PRIORITY)) is not None:
            number = checked_header(given, state.priorities)
            headers[PRIORITY] = str(number)
    except UnknownPriority as error:
        raise HttpRejection(problem(HTTPStatus.BAD_REQUEST, str(error), error.param)) from error
    return message, number


# -- how much it is, and how much there is already


def check_session(headers: MutableHeaders) -> str:
    """The session that a header names; empty: none does. Raises HttpRejection, 400."""
    try:
        return session_in(headers)
    except SessionTooLong as error:
        raise HttpRejection(problem(HTTPStatus.BAD_REQUEST, str(error), error.param)) from error


def check_work(state: HttpState, route: ClientRoute, body: bytes) -> CallWork:
    """What the call asks for. Raises HttpRejection, 400, for too many sequences of one call."""
    work = work_of(route, body)
    for name, value, most, flag in (
        ("n", work.n, state.config.max_n, "--max-n"),
        (work.field, work.prompts, state.config.max_prompts, "--max-prompts"),
    ):
        if value > most:
            shown = shorten_value(value)
            what = f"n is {shown}" if name == "n" else f"{name} has {shown} prompts"
            sentence = f"{what}, allowed are {most} a call ({flag})"
            raise HttpRejection(problem(HTTPStatus.BAD_REQUEST, sentence, name))
    return work


def check_load(state: HttpState, priority: int, account: str, sequences: int) -> None:
    """Raises HttpRejection: 429 with Retry-After while too many wait, 400 for more than can."""
    limit = state.shedding.limit
    if limit and sequences > limit:
        sentence = (
            f"the call asks for {sequences} sequences (n times its prompts), allowed to wait are"
            f" {limit} (--max-waiting): send fewer in a call"
        )
        raise HttpRejection(problem(HTTPStatus.BAD_REQUEST, sentence))
    queued, now = state.queued(priority), state.clock()
    overload = state.shedding.refusal(priority, queued, now, account, sequences)
    if overload is None:
        return
    state.overloaded(priority)
    whose = " of its account" if overload.own else ""
    sentence = (
        f"{overload.waiting} requests{whose} wait for their first token, allowed are"
        f" {overload.allowed} (--max-waiting): try again in {overload.retry_after_s} s"
    )
    answer = {"Retry-After": str(overload.retry_after_s)}
    raise HttpRejection(problem(HTTPStatus.TOO_MANY_REQUESTS, sentence, headers=answer))
