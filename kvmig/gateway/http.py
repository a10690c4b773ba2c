"""HTTP calls: the connection, and the one middleware that every call passes before its application.

A call gets its id; then, in this order, it is refused if its client may not call, if nothing is
taken now, if its body is too large or too slow, if its priority is unknown, or if too many requests
wait already. Who isn't let in hears so before anything of the body is kept, counted or parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import resource
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar, Self, cast

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvmig.core.clock import Clock, monotonic
from kvmig.core.config import BODIES, HEAD_BYTES, HEAD_S, SPARE_FILES, HttpConfig
from kvmig.core.priorities import PriorityClass, named, names_and_numbers, with_priority
from kvmig.gateway.access import ADMIN, Access
from kvmig.gateway.answer_usage import UsageReader
from kvmig.gateway.background import OpenAnswer
from kvmig.gateway.body_bounds import ModelReach, largest_size
from kvmig.gateway.body_budget import BodyBudget
from kvmig.gateway.call_work import work_of
from kvmig.gateway.error_forms import api_of
from kvmig.gateway.error_stage import ErrorStage
from kvmig.gateway.load_shedding import LoadShedding
from kvmig.gateway.loop_use import LARGE_BYTES, LoopUse
from kvmig.gateway.problems import denial, problem, shorten_value
from kvmig.gateway.request_body import (
    RETRY_AFTER,
    BodyRules,
    Refused,
    discard,
    read_body,
    rules_of,
)
from kvmig.gateway.requests import HttpCall, current_call
from kvmig.gateway.route_table import ClientRoute, RouteMatch, find_route

CALL_ID = "x-request-id"
PRIORITY = "x-vllm-priority"
PRIORITY_FIELD = "priority"
ACCOUNT = "x-kvmig-account"
TENANT = "x-kvmig-tenant"
QUOTA = "x-kvmig-quota"
TRUNCATED = "x-kvmig-truncated"
"""Of an answer that ends before its time: why."""
SCOPE = "kvmig.call"
"""Key of an ASGI scope's `HttpCall`; the connection looks for it there."""
UNREAD_BYTES = 1 << 20
"""Bytes of a denied call's body that are taken, and dropped, so that its client sees the answer."""


@dataclass
class HttpState:
    """Limits, rules and counts that all calls of one front end share; `app.state.kvmig`.

    vacant, queued and overloaded: the router's and the metrics', see `LoadShedding.refusal`.
    """

    config: HttpConfig
    access: Access
    priorities: Sequence[PriorityClass]
    registry: CollectorRegistry
    closed: bool = False
    """The server stops and takes no new requests."""
    vacant: Callable[[], bool] = lambda: False
    """Whether there is no instance."""
    queued: Callable[[int], int] = lambda priority: 0
    """Requests in instances' queues that aren't after this priority."""
    overloaded: Callable[[int], None] = lambda priority: None
    """Counts a call that was answered 429."""
    begin_work: Callable[[HttpCall], object] = lambda call: None
    """Hears of each call that engines shall work for."""
    uncounted: Callable[[], str] = lambda: ""
    """Why no such call is taken, for nobody would count it; empty: they are."""
    clock: Clock = monotonic
    keyed: bool = False
    """Whether calls without a proxy's word have keys of their own."""
    reach: ModelReach | None = None
    """What the model can use; None: it isn't known, and bounds nothing."""
    budget: BodyBudget = field(init=False)
    """Of bodies of calls whose prompts the engine doesn't have yet."""
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
        """From now on bodies are bounded by what the model can use, too."""
        self.reach = reach
        self.budget.most = BODIES * min(self.config.max_body, largest_size(reach))

    def body_rules(self, found: RouteMatch | None, headers: MutableHeaders) -> BodyRules:
        """What holds for the body of such a call."""
        route = None if found is None else found.route
        return rules_of(self.config, self.reach, route, headers)

    def payer(self, call: HttpCall, headers: MutableHeaders) -> str:
        """Whose part of the room for bodies a call's body takes; empty: nobody's is known."""
        given = headers.get("authorization", "")
        if call.tenant or not self.keyed or not given:
            return call.tenant
        return f"key {hashlib.blake2b(given.encode(), digest_size=8).hexdigest()}"

    def account(self, headers: MutableHeaders) -> str:
        """The key that a call counts for, as a proxy says it; on a port nobody is believed."""
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
        # A copy: the server's own list stays as it came.
        headers = MutableHeaders(raw=list(scope["headers"]))
        call = scope[SCOPE] = HttpCall(
            accepted(headers.get(CALL_ID)),
            state.account(headers),
            state.tenant(headers),
            quota=state.quota(headers),
        )
        headers[CALL_ID] = call.call_id

        reader = usage_reader(scope)
        answer = OpenAnswer(call, send)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = MutableHeaders(scope=message)
                own[CALL_ID] = call.call_id
                call.status = message["status"]
                if call.truncated and call.status == HTTPStatus.OK:
                    own[TRUNCATED] = call.truncated.encode("ascii", "replace").decode()
                state.count(call.status)
                if reader is not None:
                    reader.begin(own.get("content-type", ""))
            elif message["type"] == "http.response.body" and reader is not None:
                reader.take(message.get("body", b""))
            await answer.send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                call.end_answer()
                call.told = None if reader is None else reader.told()

        token = current_call.set(call)
        try:
            inner = {**scope, "headers": headers.raw}
            if scope["type"] == "websocket":
                await self.app(inner, receive, send_counted)
            else:
                # A call with an account comes from a fleet's door.
                worded = bool(call.account)
                stage = ErrorStage(api_of(route_path(scope)), call, send_counted, worded=worded)
                await self._serve(state, call, inner, headers, receive, stage)
                await answer.wait(receive)
        finally:
            if call.account:
                call.end_background()
            current_call.reset(token)
            call.leave()

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
            check_access(state, scope["method"], path, headers)
            if scope["method"] == "POST":
                check_open(state, scope["path"])
                check_stalls(state, payer)
            call.body = state.budget.enter(payer)
            rules = state.body_rules(found, headers)
            message = await read_body(rules, call.body, headers, receive)
            if message is None:
                return  # the client has left
            priority, sequences = 0, 1
            if scope["method"] == "POST":
                message, priority = check_priority(state, headers, message)
                call.priority = priority if PRIORITY in headers else None
            if found is not None and found.route.works:
                check_counted(state)
                sequences = check_work(state, found.route, message["body"])
                check_load(state, priority, call.account, sequences)
        except Refused as refused:
            if refused.unread and "expect" not in headers:
                # Whoever asks before sending hasn't sent it yet.
                await discard(receive, refused.unread)
            await refused.answer(scope, receive, stage.send)
            return
        if found is not None and found.route.works:
            state.begin_work(call)
            shedding, clock, account = state.shedding, state.clock, call.account
            call.enter(lambda by: shedding.hold(priority, by, clock(), account), sequences)
        timed = payer if len(message["body"]) >= LARGE_BYTES else ""
        receive = first(message, receive)
        del message  # a form is read piece by piece, and not kept
        await state.loop_use.run(call, timed, stage.run(self.app, scope, receive))


def route_path(scope: Scope) -> str:
    """The path within the application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def usage_reader(scope: Scope) -> UsageReader | None:
    """For the answer of a call that is charged; None: this one isn't."""
    found = None if scope["type"] != "http" else find_route(scope["method"], route_path(scope))
    charged = found is not None and found.route.charge != "nothing"
    return UsageReader(found.route.api) if found is not None and charged else None


# -- the call's id

_GOOD = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,126}[\x21-\x7e])?")


def accepted(given: str | None) -> str:
    """The client's id if it is printable ASCII of at most 128 characters, else a new one.

    vLLM bases its request ids on it. Two live calls with one id don't confuse anything: sequences
    have ids of their own, and the call's id is ambiguous.
    """
    return given if given is not None and _GOOD.fullmatch(given) else uuid.uuid4().hex


# -- who may call, and when


def check_access(state: HttpState, method: str, path: str, headers: MutableHeaders) -> None:
    """Raises Refused, 401 or 403, for a call that isn't allowed."""
    denied = state.access.denied(method, path, headers)
    if denied is not None:
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        raise Refused(denial(denied), UNREAD_BYTES if has_body else 0)


def check_open(state: HttpState, path: str) -> None:
    """Raises Refused, 503, while the server stops or has no instance for a POST.

    An operator may ask for instances when there is none.
    """
    sentence = why_closed(state)
    if sentence is None or (path.startswith(ADMIN) and not state.closed):
        return
    raise Refused(problem(HTTPStatus.SERVICE_UNAVAILABLE, sentence, headers=RETRY_AFTER))


def check_stalls(state: HttpState, payer: str) -> None:
    """Raises Refused, 429, for an account whose calls have held up everybody's again and again."""
    if closed_s := state.loop_use.stalls.closed_s(payer, state.clock()):
        again_s = math.ceil(closed_s)
        sentence = (
            "calls of this account held up all others three times within a minute, try again in"
            f" {again_s} s"
        )
        status, answer = HTTPStatus.TOO_MANY_REQUESTS, {"Retry-After": str(again_s)}
        raise Refused(problem(status, sentence, headers=answer), UNREAD_BYTES)


def check_counted(state: HttpState) -> None:
    """Raises Refused, 503, while what calls use can't be kept."""
    if sentence := state.uncounted():
        status = HTTPStatus.SERVICE_UNAVAILABLE
        raise Refused(problem(status, sentence, headers=RETRY_AFTER))


def why_closed(state: HttpState) -> str | None:
    """Why no call of a client is taken now; None: calls are taken."""
    if state.closed:
        return "the server is stopping and takes no new requests"
    return "no instance is there to run it" if state.vacant() else None


# -- the body


def first(message: Message, receive: Receive) -> Receive:
    """`message`, then whatever `receive` gives."""
    pending = [message]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


# -- the priority: vLLM's request models have a field for it, and a header that goes before it. Both
# must name a configured class. A call without one is of the class of priority 0.


class UnknownPriority(ValueError):
    """`param`: the field or header that is to blame."""

    def __init__(self, param: str, value: Any, classes: Sequence[PriorityClass]) -> None:
        allowed = names_and_numbers(classes)
        super().__init__(f"{param} is {shorten_value(value)}, must be {allowed}")
        self.param = param


def check_priority(
    state: HttpState, headers: MutableHeaders, message: Message
) -> tuple[Message, int]:
    """The body and the header with numbers in place of names, and the call's number.

    Raises Refused, 400.
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
        raise Refused(problem(HTTPStatus.BAD_REQUEST, str(error), error.param)) from error
    return message, number


def checked_body(body: bytes, classes: Sequence[PriorityClass]) -> tuple[bytes, int]:
    """`body` with the number of the class that it names, or itself; and the number.

    What is no JSON object is the engine's to refuse. Raises UnknownPriority.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, 0
    if PRIORITY_FIELD not in fields:
        return body, 0
    try:
        value = msgspec.json.decode(fields[PRIORITY_FIELD])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        cut = bytes(fields[PRIORITY_FIELD])[:100].decode(errors="replace")
        raise UnknownPriority(PRIORITY_FIELD, cut, classes) from None
    number = number_of(PRIORITY_FIELD, value, classes)
    if number == value:
        return body, number
    return msgspec.json.encode({**fields, PRIORITY_FIELD: number}), number


def checked_header(given: str, classes: Sequence[PriorityClass]) -> int:
    """The number of the class that the header names. Raises UnknownPriority."""
    try:
        value: int | str = int(given)
    except ValueError:
        value = given
    return number_of(PRIORITY, value, classes)


def number_of(param: str, value: Any, classes: Sequence[PriorityClass]) -> int:
    """The number of the class that `value`, a name or a number, means. Raises UnknownPriority."""
    found = None
    if isinstance(value, str):
        found = named(classes, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = with_priority(classes, value)
    if found is None:
        raise UnknownPriority(param, value, classes)
    return found.priority


# -- how much it is, and how much there is already


def check_work(state: HttpState, route: ClientRoute, body: bytes) -> int:
    """The sequences that the call asks for. Raises Refused, 400, for too many of one call."""
    work = work_of(route, body)
    for name, value, most, flag in (
        ("n", work.n, state.config.max_n, "--max-n"),
        (work.field, work.prompts, state.config.max_prompts, "--max-prompts"),
    ):
        if value > most:
            shown = shorten_value(value)
            what = f"n is {shown}" if name == "n" else f"{name} has {shown} prompts"
            sentence = f"{what}, allowed are {most} a call ({flag})"
            raise Refused(problem(HTTPStatus.BAD_REQUEST, sentence, name))
    return work.sequences


def check_load(state: HttpState, priority: int, account: str, sequences: int) -> None:
    """Raises Refused: 429 with Retry-After while too many wait, 400 for more than may ever wait."""
    limit = state.shedding.limit
    if limit and sequences > limit:
        sentence = (
            f"the call asks for {sequences} sequences (n times its prompts), allowed to wait are"
            f" {limit} (--max-waiting): send fewer in a call"
        )
        raise Refused(problem(HTTPStatus.BAD_REQUEST, sentence))
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
    raise Refused(problem(HTTPStatus.TOO_MANY_REQUESTS, sentence, headers=answer))


# -- the connection

REQUEST_TIMEOUT, HEADERS_TOO_LARGE = 408, 431


def most_clients(each: int) -> float:
    """Connections that this process has files for. each: files that one of them takes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return math.inf
    return (files - min(SPARE_FILES, files // 4)) // each


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with bounds on a head's size and time, and on a pause in reading.

    uvicorn waits for a call's headers for ever, and keeps whatever comes of them; and for ever for
    a client that doesn't read its answer. This class has no limits of its own: a front end serves
    with one that has, see `limited`. `on_refusal` hears of answers before there is a call.
    """

    each: ClassVar[int] = 1
    """Files that the process has open for one connection."""
    most: ClassVar[float] = math.inf
    """Connections at once; one more is closed: the process needs files for more than clients."""
    head_bytes: ClassVar[int] = HEAD_BYTES
    head_s: ClassVar[float] = HEAD_S
    send_timeout_s: ClassVar[float] = HttpConfig().send_timeout_s
    on_refusal: ClassVar[Callable[[int], None]] = staticmethod(lambda status: None)

    _in_head = True
    _came = 0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _paused: HttpCall | None = None

    @classmethod
    def limited(cls, send_timeout_s: float, on_refusal: Callable[[int], None]) -> type[Self]:
        """The connections of one front end: uvicorn makes them, and gives them nothing else."""
        own = {
            "most": most_clients(cls.each),
            "send_timeout_s": send_timeout_s,
            "on_refusal": staticmethod(on_refusal),
        }
        return type(cls.__name__, (cls,), own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_pause()
        if (call := self._call()) is not None:
            call.lose_client()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client hasn't read for so long that everything in between is full."""
        super().pause_writing()
        self._end_pause()
        self._unread = self.loop.call_later(self.send_timeout_s, self.transport.abort)
        self._paused = self._call()
        if self._paused is not None:
            self._paused.stopped_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_pause()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # A read is small: what it has beyond the last call's body counts too much at most once.
            self._came += len(data)
            if self._came > self.head_bytes:
                self._refuse(HEADERS_TOO_LARGE, f"Headers of more than {self.head_bytes} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        type(self).on_refusal(400)
        super().send_400_response(msg)

    def _call(self) -> HttpCall | None:
        """The one that is answered, or was last."""
        return cast("dict[str, HttpCall]", self.scope or {}).get(SCOPE)

    def _begin_head(self) -> None:
        self._in_head, self._came = True, 0
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._too_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_pause(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self._paused is not None:
            self._paused.reads_again()
            self._paused = None

    def _too_late(self) -> None:
        self._late = None
        self._refuse(REQUEST_TIMEOUT, f"No headers within {self.head_s:g} s.")

    def _refuse(self, status: int, sentence: str) -> None:
        if self.transport.is_closing():
            return
        type(self).on_refusal(status)
        # Between two answers only: else it would end up inside of one. (None before the first.)
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
            body = sentence.encode()
            head = STATUS_LINE[status] + (
                b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                % len(body)
            )
            self.transport.write(head + body)
        self.transport.close()
