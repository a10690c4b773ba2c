"""Calls of clients, each relayed to the server that has the fewest: the application's own part.

A call is sent again to another server as long as its client has nothing of an answer. The client
gets the server's answer without the usage that only the ledger has asked for.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from kvmig.asgi.call import HttpCall, current_call
from kvmig.asgi.call_work import work_of
from kvmig.asgi.error_forms import ApiError
from kvmig.asgi.problems import problem
from kvmig.asgi.request_body import RETRY_AFTER
from kvmig.asgi.route_table import ClientRoute, find_route
from kvmig.command.answer_count import AnswerCount, AnswerPace
from kvmig.command.call_meter import CallMeter, CountedCall
from kvmig.command.call_plan import IMAGES, SPEECH, CallPlan, fields_of, limited, plan_call
from kvmig.command.event_splitter import EventSplitter, EventTooLarge
from kvmig.command.server_call import ServerCall
from kvmig.command.server_pool import ServerInstance, ServerPool
from kvmig.core.clock import TimeSource, monotonic
from kvmig.frontend.grant_link import AWAY, GrantLink
from kvmig.frontend.middleware import route_path
from kvmig.proxy.relay import OWN, AnswerHead, UpstreamProtocolError

WHOLE_BYTES = 32 << 20
"""Most bytes of an answer that is no stream and is kept until it is complete."""
DROPPED = OWN | {b"content-length", b"transfer-encoding", b"server", b"date"}
"""Headers of a server's answer that are not the client's."""
STOPS = "the deployment stops"


class CallRefused(Exception):
    """The call gets no answer of a server's."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class AnswerBroken(Exception):
    """An answer of which the client has a part will not be completed."""


class CommandRelay:
    """ASGI, for all paths that are clients'. Inside of `HttpMiddleware`."""

    def __init__(
        self,
        pool: ServerPool,
        meter: CallMeter,
        quotas: GrantLink | None = None,
        *,
        asks_usage: bool = True,
        clock: TimeSource = monotonic,
    ) -> None:
        """quotas: None: calls may use as many tokens as they
        like. asks_usage: whether the servers take `stream_options.include_usage`."""
        self._pool = pool
        self._meter = meter
        self._quotas = quotas
        self._asks_usage = asks_usage
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.pace = AnswerPace()
        self.idle = asyncio.Event()
        """Set while no call is relayed."""
        self.idle.set()

    @property
    def live(self) -> int:
        """Calls that are relayed now."""
        return len(self._tasks)

    def give_up(self) -> None:
        """End all calls: the deployment stops."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        found = find_route(scope["method"], route_path(scope))
        call = current_call.get()
        if found is None or call is None or scope["type"] != "http":
            sentence = f"there is no {scope['method']} {route_path(scope)[:100]}"
            await problem(HTTPStatus.NOT_FOUND, sentence)(scope, receive, send)
            return
        body = (await receive()).get("body", b"")
        # A task of its own: the deployment's end, or its client's, may cancel it, and nothing else.
        answering = asyncio.create_task(self._answer(scope, found.route, call, body, send))
        leaving = asyncio.create_task(_until_left(receive))
        self._tasks.add(answering)
        self.idle.clear()
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                await asyncio.wait((answering,))
            if answering.cancelled():
                if not call.left and self._stopping:
                    await self._break(call, scope, receive, send)
                return
            try:
                await answering
            except CallRefused as why:
                headers = RETRY_AFTER if why.status == HTTPStatus.SERVICE_UNAVAILABLE else None
                await problem(why.status, str(why), headers=headers)(scope, receive, send)
        finally:
            self._tasks.discard(answering)
            if not self._tasks:
                self.idle.set()
            for task in (answering, leaving):
                task.cancel()

    async def _break(self, call: HttpCall, scope: Scope, receive: Receive, send: Send) -> None:
        """End a call that the deployment's end has cut."""
        if call.status:
            call.failure = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, STOPS)
            raise AnswerBroken(STOPS)
        await problem(HTTPStatus.SERVICE_UNAVAILABLE, STOPS, headers=RETRY_AFTER)(
            scope, receive, send
        )

    async def _answer(
        self, scope: Scope, route: ClientRoute, call: HttpCall, body: bytes, send: Send
    ) -> None:
        """Raises CallRefused before the answer, AnswerBroken within it."""
        work = work_of(route, body)
        plan = plan_call(
            route,
            body,
            Headers(scope=scope).get("content-type", ""),
            sequences=work.sequences,
            prompts=work.prompts,
            asks_usage=self._asks_usage,
        )
        _check_plan(route, body)
        counted = self._meter.enter(call) if route.works else None
        if counted is not None and call.quota and self._quotas is not None:
            plan = await self._granted(call, counted, plan, work.sequences)
        tried: set[ServerInstance] = set()
        why = "no server is there to answer it"
        while (instance := await self._pool.turns.take_place(call.tenant, tried)) is not None:
            tried.add(instance)
            attempt = _Attempt(self, instance, scope, route, call, plan, counted)
            try:
                if await attempt.run(send):
                    return
            except UpstreamProtocolError as error:
                why = f"its server broke off before it answered: {error}"
        raise CallRefused(HTTPStatus.SERVICE_UNAVAILABLE, why)

    async def _granted(
        self, call: HttpCall, counted: CountedCall, plan: CallPlan, sequences: int
    ) -> CallPlan:
        """The call with as many tokens as its quota grants, all at once: what a server computes
        can't be held back token by token. Raises CallRefused."""
        assert self._quotas is not None
        granted = await self._quotas.ask_for_tokens(
            counted.seq,
            call.account,
            counted.began,
            least=plan.prompt_most + plan.output_least,
            want=plan.prompt_most + plan.output_most,
        )
        if granted is None:
            raise CallRefused(HTTPStatus.SERVICE_UNAVAILABLE, AWAY)
        if not granted.tokens:
            raise CallRefused(HTTPStatus.TOO_MANY_REQUESTS, granted.why)
        return limited(plan, granted.tokens - plan.prompt_most, sequences)

    def begin_answer(self, call: HttpCall, counted: CountedCall | None) -> None:
        """The first of a call's answer has come: none of its sequences waits any more."""
        for number in range(call.sequences):
            name = f"{call.call_id}-{number}"
            call.submitted(name)
            call.ended(name)
        if counted is not None and counted.ttft_ms is None:
            counted.ttft_ms = (self.now() - counted.entered) * 1e3

    def now(self) -> float:
        """The time by a steady clock, in seconds."""
        return self._clock()

    def note_sign_of_life(self, instance: ServerInstance) -> None:
        """Something came from an instance."""
        instance.heard_at = self._clock()


class _Attempt:
    """A call at one server, which has given it a place."""

    def __init__(
        self,
        relay: CommandRelay,
        instance: ServerInstance,
        scope: Scope,
        route: ClientRoute,
        call: HttpCall,
        plan: CallPlan,
        counted: CountedCall | None,
    ) -> None:
        self._relay = relay
        self._instance = instance
        self._scope = scope
        self._route = route
        self._call = call
        self._plan = plan
        self._counted = counted
        self._count = AnswerCount(route, plan, call.sequences)
        self._began = False
        self._sent: float | None = None
        """When the server got the call; None: it hasn't, or its answer comes in parts that count
        by themselves."""

    async def run(self, send: Send) -> bool:
        """Whether the client has an answer now. Raises UpstreamProtocolError if it has nothing of
        one, AnswerBroken if it has a part."""
        server: ServerCall | None = None
        try:
            server = await ServerCall.begin(self._instance)
            if server is None:
                return False
            if self._counted is not None:
                self._counted.attempts += 1
                self._counted.count = self._count
            await self._relay_answer(server, send)
        except asyncio.CancelledError:
            self._fail()
            self._count_left()
            raise
        except UpstreamProtocolError as error:
            if not self._began:
                raise
            self._fail()
            sentence = "the server ended while it answered"
            self._call.failure = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, sentence)
            raise AnswerBroken(f"{sentence}: {error}") from error
        finally:
            if server is not None:
                server.close()
            self._instance.end_call()
        return True

    def _fail(self) -> None:
        if self._counted is not None:
            self._counted.failed = True

    def _count_left(self) -> None:
        """Count what the server has made of an answer that its client doesn't wait for."""
        if self._sent is None or self._plan.streams:
            return
        seconds, sequences = self._relay.now() - self._sent, self._call.sequences
        most = self._plan.output_most
        self._count.take_left(self._relay.pace.estimate_output(seconds, sequences, most))

    async def _relay_answer(self, server: ServerCall, send: Send) -> None:
        query: bytes = self._scope["query_string"]
        path: bytes = self._scope.get("raw_path") or self._scope["path"].encode()
        target = b"%s?%s" % (path, query) if query else path
        self._sent = self._relay.now()
        head = await server.send(
            self._scope["method"], target, self._scope["headers"], self._plan.body
        )
        self._relay.note_sign_of_life(self._instance)
        self._call.rendered()
        if is_read_by_events(head):
            self._sent = None
            await self._relay_events(server, head, send)
        elif _kept(head):
            await self._relay_whole(server, head, send)
        else:
            await self._relay_parts(server, head, [], send, text=is_text(head, self._route))

    async def _begin(self, head: AnswerHead, send: Send, length: int | None = None) -> None:
        self._began = True
        self._relay.begin_answer(self._call, self._counted)
        headers = [one for one in head.headers if one[0] not in DROPPED]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await send({"type": "http.response.start", "status": head.status, "headers": headers})

    async def _relay_events(self, server: ServerCall, head: AnswerHead, send: Send) -> None:
        splitter = EventSplitter()
        while part := await server.next_part():
            self._relay.note_sign_of_life(self._instance)
            if not self._began:
                await self._begin(head, send)
            try:
                events = splitter.feed(part)
            except EventTooLarge as error:
                raise UpstreamProtocolError(str(error)) from error
            shown = [one for one in events if not self._hides(one)]
            if shown:
                await _send_part(send, b"".join(shown))
        if not self._began:
            await self._begin(head, send)
        rest = splitter.rest()
        await _send_part(send, b"" if self._hides(rest) else rest, more=False)

    def _hides(self, event: bytes) -> bool:
        """Count an event; whether the client does not get it."""
        return self._count.take_event(event) and self._plan.hides_usage

    async def _relay_whole(self, server: ServerCall, head: AnswerHead, send: Send) -> None:
        """An answer that the client gets once all of it is here, so that another server can still
        give it."""
        parts, size = [], 0
        while part := await server.next_part():
            self._relay.note_sign_of_life(self._instance)
            parts.append(part)
            size += len(part)
            if size > WHOLE_BYTES:
                await self._relay_parts(server, head, parts, send, text=True)
                return
        body = b"".join(parts)
        if head.status < HTTPStatus.BAD_REQUEST:
            self._count.take_whole(body, json=True)
            if self._sent is not None:
                took_s = self._relay.now() - self._sent
                self._relay.pace.learn_answer(self._count.output, self._call.sequences, took_s)
        self._sent = None
        await self._begin(head, send, len(body))
        await _send_part(send, body, more=False)

    async def _relay_parts(
        self, server: ServerCall, head: AnswerHead, parts: list[bytes], send: Send, *, text: bool
    ) -> None:
        """An answer of which nothing is read: a recording, an image, plain text."""
        self._sent = None
        await self._begin(head, send)
        for part in parts:
            await self._pass_part(part, send, text=text)
        while part := await server.next_part():
            self._relay.note_sign_of_life(self._instance)
            await self._pass_part(part, send, text=text)
        await _send_part(send, b"", more=False)

    async def _pass_part(self, part: bytes, send: Send, *, text: bool) -> None:
        if text:
            self._count.take_text(part)
        await _send_part(send, part)


async def _send_part(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _kept(head: AnswerHead) -> bool:
    return b"json" in head.get(b"content-type").lower()


def is_read_by_events(head: AnswerHead) -> bool:
    """Whether the answer is a stream of events that can be read here: none that is compressed."""
    plain = head.get(b"content-encoding").lower() in (b"", b"identity")
    return head.events and head.status == HTTPStatus.OK and plain


def is_text(head: AnswerHead, route: ClientRoute) -> bool:
    """Whether the bytes of an answer that is not read count as text: all do that are no media."""
    if route.path in (SPEECH, IMAGES) or route.content == "image":
        return False
    return not head.get(b"content-type").lower().startswith((b"audio/", b"image/", b"video/"))


def _check_plan(route: ClientRoute, body: bytes) -> None:
    """Raises CallRefused for what only kvmig's own engines can do."""
    if route.path != "/v1/responses":
        return
    if (fields_of(body) or {}).get("background") == b"true":
        sentence = "background is true, must be false: the model's server keeps no responses"
        raise CallRefused(HTTPStatus.BAD_REQUEST, sentence)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
