"""The launcher as a front end sees it: which instances there are, and orders about them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvmig.asgi.errors import InstanceLost, LauncherGone, OrderFailed
from kvmig.controlplane.front_messages import (
    AskFronts,
    FrontAnswer,
    FrontAnswers,
    FrontAsked,
    FrontQuestion,
    FrontReply,
    SessionsFound,
)
from kvmig.controlplane.messages import (
    ClusterMember,
    ClusterMessage,
    EvacuateInstance,
    Members,
    MessagesRefused,
    OrderDone,
    RaiseFence,
)
from kvmig.core.background import BackgroundTasks, cancel_tasks
from kvmig.core.config import instance_number
from kvmig.core.errors import PeerError, StartupError, TransportError
from kvmig.core.order_fence import NO_TOKEN, OrderToken
from kvmig.core.patience import wait_for_answer
from kvmig.frontend.router import FrontendRouter
from kvmig.rpc.messages import RpcMessage
from kvmig.rpc.zmq_sockets import RpcClient

RETRY_S = 0.5
"""Pause between two attempts to connect to the launcher."""
INSTANCE_RETRY_S = 1.0
"""Pause before a new connection to an instance that didn't answer."""
ORDER_TIMEOUT_S = 30.0
"""Timeout of an answer: the launcher answers at once, once vLLM has read flags."""

log = logging.getLogger(__name__)

Answer = TypeVar("Answer", OrderDone, FrontAnswers)


ANSWER_S = 5.0
"""Time for the launcher to pass answers of other front ends back."""

News = Members | EvacuateInstance | MessagesRefused | PeerError
"""Messages of the launcher to a front end; PeerError: one that can't be taken."""


async def know_nothing(asked: FrontAsked) -> FrontReply:
    """The answer of a front end that has no sessions."""
    return SessionsFound()


class LauncherLink:
    """The connection to the launcher. Make it inside a running event loop; `close` it.

    name: the front end's. receive: is called with each message of the launcher
    (`InstanceMembership.apply_news`).
    """

    def __init__(
        self, endpoint: str, secret: bytes, name: str, receive: Callable[[News], None]
    ) -> None:
        self._endpoint = endpoint
        self._secret = secret
        self._name = name
        self._deliver = receive
        self.reply: Callable[[FrontAsked], Awaitable[FrontReply]] = know_nothing
        """Answers what the launcher, or another front end, asks."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[OrderDone | FrontAnswers]] = {}
        self._client: RpcClient | None = None
        self._replies = BackgroundTasks("answers to other front ends")
        self._task = asyncio.create_task(self._run(), name="link to the launcher")

    async def order(self, make: Callable[[int], RpcMessage]) -> tuple[str, ...]:
        """Give an order, made from its number; returns the instances that it is about.

        Raises OrderFailed with the launcher's message, or LauncherGone.
        """
        done = await self._call(make, OrderDone, ORDER_TIMEOUT_S)
        if done.refused:
            raise OrderFailed(done.refused, done.error)
        return done.instances

    async def ask_fronts(
        self, asked: FrontAsked, front: str = "", timeout_s: float = 2.0
    ) -> dict[str, FrontReply]:
        """Ask the other front ends of this server; their replies, by name. front: only this one.

        Who is gone, or doesn't answer within `timeout_s`, is left out. Raises LauncherGone.
        """
        answers = await self._call(
            lambda call_id: AskFronts(call_id, asked, front, timeout_s),
            FrontAnswers,
            timeout_s + ANSWER_S,
        )
        return answers.replies

    async def _call(
        self, make: Callable[[int], RpcMessage], answered: type[Answer], timeout_s: float
    ) -> Answer:
        call_id = next(self._ids)
        answer: asyncio.Future[OrderDone | FrontAnswers] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[call_id] = answer
        try:
            if self._client is None:
                raise LauncherGone("the launcher is not connected")
            self._client.send(make(call_id))
            done = await wait_for_answer(answer, timeout_s)
        except TransportError as error:
            raise LauncherGone(f"the launcher is gone: {error}") from error
        except TimeoutError as error:
            raise LauncherGone(f"the launcher did not answer within {timeout_s:g} s") from error
        finally:
            del self._waiting[call_id]
        if not isinstance(done, answered):
            raise LauncherGone(f"the launcher answered with {type(done).__name__}")
        return done

    async def raise_fence(self, token: OrderToken) -> None:
        """Let no order with an earlier token be carried out from now on.

        Raises OrderFailed if this one is an earlier one itself, or LauncherGone.
        """
        if token != NO_TOKEN:
            await self.order(lambda call_id: RaiseFence(call_id, token))

    async def close(self) -> None:
        """Disconnect."""
        await cancel_tasks(self._task)
        await self._replies.close()

    async def _run(self) -> None:
        while True:
            client = RpcClient(self._endpoint, self._secret, "gateway", self._name, ClusterMessage)
            self._client = client
            try:
                await self._listen(client)
            except TransportError as error:
                log.warning("the launcher is lost: %s", error)
            except Exception:  # a new connection begins with all that the launcher knows
                log.exception("a message of the launcher could not be carried out")
            finally:
                self._client = None
                client.close()
                for answer in self._waiting.values():
                    if not answer.done():
                        answer.set_exception(TransportError("connection lost"))
            await asyncio.sleep(RETRY_S)

    async def _listen(self, client: RpcClient) -> None:
        async for message, _ in client.messages("the launcher", self._deliver):
            match message:
                case Members() | EvacuateInstance() | MessagesRefused():
                    self._deliver(message)
                case FrontQuestion():
                    self._replies.start(self._reply_to(client, message))
                case OrderDone() | FrontAnswers():
                    answer = self._waiting.get(message.call_id)
                    if answer is not None and not answer.done():
                        answer.set_result(message)
                case _:
                    name = type(message).__name__
                    log.warning("the launcher sent %s", name)
                    self._deliver(PeerError(f"{name} isn't for a front end"))

    async def _reply_to(self, client: RpcClient, question: FrontQuestion) -> None:
        reply = await self.reply(question.asked)
        try:
            client.send(FrontAnswer(question.call_id, reply))
        except TransportError as error:
            log.info("an answer comes too late: %s", error)


class InstanceMembership:
    """Keeps the router's instances those that the launcher names: they come, go and come again.

    Make it inside a running event loop; `close` it. members: as last reported.
    """

    def __init__(self, router: FrontendRouter) -> None:
        self.members: Sequence[ClusterMember] = ()
        self._router = router
        self._followers = BackgroundTasks("instances")
        self._following: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """Endpoint by instance, and the task that keeps it in the router."""
        self._ended: set[asyncio.Task[None]] = set()
        self._described: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    async def first(self, timeout_s: float) -> list[bytes]:
        """Wait until all that serve are connected; returns the engines' descriptions.

        Raises StartupError.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._described or not self._awaited() <= self._described.keys():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise StartupError(f"no instance to connect to within {timeout_s:g} s") from error
        return [self._described[name] for name in self._awaited()]

    def _awaited(self) -> set[str]:
        """The instances that a start waits for: this server's, or others' where it has none."""
        own = {one.instance for one in self.members if not one.server}
        return (own & self._following.keys()) or set(self._following)

    async def close(self) -> None:
        """Stop following; the router drops all instances."""
        self.members = ()
        tasks = [task for _, task in self._following.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._ended, return_exceptions=True)  # failures are logged

    def apply_news(self, news: News) -> None:
        """Take a message of the launcher."""
        match news:
            case Members():
                self._take(news)
            case EvacuateInstance():
                self._router.evacuate(news.instance, ends=news.ends)
            case MessagesRefused():
                self._router.messages_refused(news.process, news.counts)
            case PeerError():
                self._router.refused(news)

    def _take(self, members: Members) -> None:
        """Follow these instances. A new endpoint is a new start, which knows of none before."""
        self.members = members.members
        self._router.fleet.preferred = members.weights
        self._router.fleet.unlike = members.unlike
        own = [one for one in self.members if not one.server]
        if own and all(one.state == "failed" for one in self.members):
            self._router.give_up("no instance is left")
        wanted = {one.instance: one.endpoint for one in members.members if one.endpoint}
        guests = {one.instance for one in members.members if one.server}
        before: dict[str, asyncio.Task[None]] = {}
        for name, (endpoint, task) in list(self._following.items()):
            if wanted.get(name) != endpoint:
                del self._following[name]
                self._described.pop(name, None)
                task.cancel()
                self._ended.add(task)
                task.add_done_callback(self._ended.discard)
                before[name] = task
        for name, endpoint in wanted.items():
            if name not in self._following:
                work = self._follow(name, endpoint, before.get(name), guest=name in guests)
                task = self._followers.start(work, f"follow {name}")
                self._following[name] = (endpoint, task)
        self._changed.set()

    async def _follow(
        self, name: str, endpoint: str, before: asyncio.Task[None] | None, *, guest: bool
    ) -> None:
        """Hold the instance in the router until cancelled. guest: it is another server's."""
        index = None if guest else instance_number(name)
        if before is not None:
            await asyncio.wait([before])
        try:
            while True:
                try:
                    self._described[name] = await self._router.add_instance(
                        name, endpoint, index=index, guest=guest
                    )
                    break
                except InstanceLost as error:
                    log.warning("%s", error)
                    await asyncio.sleep(INSTANCE_RETRY_S)
            self._changed.set()
            await asyncio.Event().wait()
        finally:
            # One that left when it was told to isn't named any more, or starts again as told.
            crashed = any(one.instance == name and not one.ordered for one in self.members)
            await self._router.remove_instance(name, crashed=crashed)
