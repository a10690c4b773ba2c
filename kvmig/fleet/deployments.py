"""A deployment as the server sees it: its reports of itself, and orders to it, on its socket."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence, Set
from typing import Any, TypeVar

import httpx
import msgspec

from kvmig.asgi.body_bounds import ModelReach
from kvmig.core.api_records import InstanceRow, ModelBody, RequestRow, RowListing
from kvmig.core.background import UNFORESEEN_S, cancel_tasks
from kvmig.core.errors import StartupError
from kvmig.core.live_records import MoveRecord
from kvmig.core.order_fence import TOKEN_HEADER, OrderToken
from kvmig.fleet.flag_rolls import RolledStart, RollStep, start_of_instance
from kvmig.proxy.messages import ModelCard

RETRY_S = 0.05
"""Pause between two attempts to connect to a starting deployment."""
SILENT_S = 20.0
"""A deployment says something at least every 5 s."""
ORDER_S = 40.0
"""Timeout of an order: its launcher may read an engine's flags first."""
TOLD_S = 10.0
"""Timeout of the event with an order's result; it comes within moments of the answer."""
CARD_S = 10.0
"""Timeout of the list of its models."""
ADMIN = "/kvmig/v1"
RECENT_MOVES = 64

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class OrderUnanswered(StartupError):
    """An order may have been carried out, or not. One that was not by the next contact never is."""


class ServedModel(msgspec.Struct, frozen=True):
    """An entry in the list of its models. parent: of an adapter."""

    created: int = 0
    owned_by: str = "kvmig"
    max_model_len: int | None = None
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of /v1/models."""

    data: tuple[ServedModel, ...] = ()


class DeploymentEvent(msgspec.Struct, frozen=True):
    """Event `instances`."""

    live: int = 0
    parked: bool = False
    """Whether it has given the memory of its KV caches back."""
    data: tuple[InstanceRow, ...] = ()


class DeploymentWatcher:
    """Follows the events of a deployment until `close`; make it inside a running event loop."""

    def __init__(self, socket: str, changed: Callable[[], None], term: int = 0) -> None:
        """socket: its path. changed: called after each of its events. term: of the server, see
        `kvmig.core.order_fence`."""
        self.told = DeploymentEvent()
        self.card: ModelCard | None = None
        """The answer on its model, once it serves and was asked."""
        self.migrations = 0
        """Committed migrations that were reported."""
        self.moves: deque[MoveRecord] = deque(maxlen=RECENT_MOVES)
        """The last of them."""
        self.reports: deque[MoveRecord] = deque(maxlen=RECENT_MOVES)
        """The last migrations that ended, the aborted ones, too."""
        self.looked = asyncio.Event()
        """Set once an event of it has come, or it isn't there."""
        self.token = OrderToken(term)
        """The token of orders now. What is known here was said after the deployment had refused all
        earlier ones."""
        self._is_unsure = False
        """Whether an order may be carried out late."""
        self._contacted = asyncio.Event()
        """Set by the first event of each contact."""
        self._changed = changed
        self._heard = asyncio.Event()
        """Set by each event of it."""
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=socket, verify=False),
            base_url="http://deployment",
            timeout=httpx.Timeout(ORDER_S, read=SILENT_S),
        )
        self._learning: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._follow(), name=f"events of {socket}")

    @property
    def order_headers(self) -> dict[str, str]:
        """Headers of an order that is given now."""
        return {TOKEN_HEADER: str(self.token)} if self.token.term else {}

    @property
    def serving(self) -> int:
        """Instances that serve, which a deployment has when its front end does."""
        if self.told.parked:
            return 0
        return sum(one.state == "serving" for one in self.told.data)

    async def close(self) -> None:
        """Follow no more."""
        tasks = [one for one in (self._task, self._learning) if one is not None]
        await cancel_tasks(*tasks)
        await self._http.aclose()
        self.take_event(DeploymentEvent())  # who waits for an instance waits no more

    async def add(
        self,
        count: int,
        gpus: Sequence[str] = (),
        node: str = "",
        start: RolledStart | None = None,
    ) -> set[str]:
        """Start `count` instances more; their names. `told` has them then.

        gpus: ids of those that each gets; none: the deployment chooses. node: id of the Ray node
        that they run on; empty: none. start: as what; None: as it starts others. Raises
        StartupError with the deployment's error message.
        """
        body: dict[str, object] = {"count": count}
        if start is not None:
            body |= start._asdict()
        if gpus:
            body["gpus"] = list(gpus)
        if node:
            body["node"] = node
        before = self._names()
        try:
            answer = await self._order("POST", f"{ADMIN}/instances", json=body)
        except OrderUnanswered:
            await self.settle()
            found = self._names() - before
            if len(found) != count:
                raise
            return found
        added = {one.id for one in msgspec.json.decode(answer, type=DeploymentEvent).data}
        await self._until(added, lambda: added <= self._names())
        return added

    async def drain(self, instance: str, deadline_s: float | None = None) -> None:
        """Let an instance's requests go elsewhere, then end it; `told` has that then.

        deadline_s: what is left then goes on elsewhere by recompute; None: the deployment's usual
        one. Raises StartupError with the deployment's error message.
        """
        before = self._state_of(instance)
        query = {} if deadline_s is None else {"deadline_s": deadline_s}
        await self._carry_out(
            self._order("DELETE", f"{ADMIN}/instances/{instance}", params=query),
            instance,
            lambda: self._state_of(instance) != before,
            lambda: self._state_of(instance) in ("draining", None),
        )

    async def set_deadline(self, instance: str, deadline_s: float | None) -> None:
        """Give an instance that is drained another deadline, see `drain`. Raises StartupError with
        the deployment's error message."""
        query = {} if deadline_s is None else {"deadline_s": deadline_s}
        await self._order("DELETE", f"{ADMIN}/instances/{instance}", params=query)

    async def stop_drain(self, instance: str) -> None:
        """Let an instance that is drained serve again; `told` has its new state then.

        Raises StartupError with the deployment's error message.
        """
        before = self._state_of(instance)
        await self._carry_out(
            self._order("DELETE", f"{ADMIN}/instances/{instance}/drain"),
            instance,
            lambda: self._state_of(instance) != before,
            lambda: self._state_of(instance) == "serving",
        )

    async def wait_serving(self, instance: str, timeout_s: float) -> None:
        """Return once an instance serves. Raises StartupError if it fails, is gone, or takes longer
        than that."""
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self._state_of(instance)) != "serving":
                    if state in (None, "failed", "lost"):
                        raise StartupError(f"instance {instance} is {state or 'gone'}")
                    await self._heard.wait()
        except TimeoutError as error:
            raise StartupError(
                f"instance {instance} does not serve within {timeout_s:g} s"
            ) from error

    async def restart(self, step: RollStep) -> None:
        """Move an instance's requests away, then start it again with the flags or engine of `step`.

        Returns once `told` shows the order's effect. Instances that start later have its flags,
        too. Raises StartupError with the deployment's error message.
        """
        instance = step.instance
        before = self._row_of(instance)
        body = {"instances": [instance], "deadline_s": step.deadline_s, **step.start._asdict()}
        await self._carry_out(
            self._order("POST", f"{ADMIN}/instances/restart", json=body),
            instance,
            lambda: self._row_of(instance) != before,
            lambda: self._restarts(instance, step.start),
        )

    async def _carry_out(
        self,
        order: Awaitable[bytes],
        instance: str,
        reported: Callable[[], bool],
        there: Callable[[], bool],
    ) -> None:
        """Give an order about an instance; its effect is known then. If only the answer got lost,
        the next contact shows the effect, and the order isn't given again.

        reported: whether an event has changed what the order changes. there: whether the effect is
        known: an event may have come before the answer, or an earlier order may have had it.
        """
        try:
            await order
        except OrderUnanswered:
            await self.settle()
            if not there():
                raise
        else:
            await self._until({instance}, lambda: reported() or there())

    def _names(self) -> set[str]:
        return {one.id for one in self.told.data}

    def _restarts(self, instance: str, start: RolledStart) -> bool:
        """Whether an instance is such, leaves its requests to others before it is, or awaits its
        turn."""
        rows = [one for one in self.told.data if one.id == instance]
        return any(
            one.state == "draining"
            or (one.state == "serving" and one.detail)
            or start_of_instance(one) == start
            for one in rows
        )

    def _state_of(self, instance: str) -> str | None:
        return next((one.state for one in self.told.data if one.id == instance), None)

    def _row_of(self, instance: str) -> tuple[object, ...] | None:
        """What a restart changes of it, however soon it is over."""
        rows = (one for one in self.told.data if one.id == instance)
        changed = ((one.state, one.detail, one.flags, one.vllm, one.pid) for one in rows)
        return next(changed, None)

    async def move(self, request_id: str, destination: str | None) -> MoveRecord:
        """Move a request, and wait for the end of its migration. destination: None: the instance
        with the most room. Raises StartupError with the deployment's error message."""
        body = {"request_id": request_id, "destination": destination}
        answer = await self._order("POST", f"{ADMIN}/migrations", json=body)
        return msgspec.json.decode(answer, type=MoveRecord)

    async def requests(self, timeout_s: float) -> list[RequestRow]:
        """List the live requests. Raises StartupError if it doesn't answer within that time."""
        if self._http.is_closed:
            raise StartupError("it has ended")
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._http.get(f"{ADMIN}/requests", timeout=timeout_s)
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=RowListing[RequestRow]).data
        except (httpx.HTTPError, TimeoutError, msgspec.DecodeError) as error:
            raise StartupError(f"it doesn't list its requests: {error!r}") from error

    async def park(self) -> None:
        """Order the deployment to give the memory of its KV caches back; `told` shows it soon.

        Raises StartupError.
        """
        await self._order("POST", f"{ADMIN}/park")

    async def unpark(self) -> None:
        """Order the deployment to check that it computes as before, and serve; `told` shows it.

        Raises StartupError.
        """
        await self._order("POST", f"{ADMIN}/unpark")

    async def _until(self, names: Set[str], done: Callable[[], bool]) -> None:
        """Wait for its event, which comes after its answer: by `told` now the order would be
        repeated."""
        try:
            async with asyncio.timeout(TOLD_S):
                while not done():
                    await self._heard.wait()
        except TimeoutError as error:
            every = ", ".join(sorted(names))
            raise OrderUnanswered(f"it does not report {every} within {TOLD_S:g} s") from error

    async def _order(self, method: str, path: str, **more: Any) -> bytes:
        """Returns the answer's body. Raises StartupError; OrderUnanswered where it may be carried
        out all the same."""
        if self._http.is_closed:
            raise StartupError("it has ended")
        try:
            answer = await self._http.request(
                method, path, timeout=ORDER_S, headers=self.order_headers, **more
            )
        except httpx.HTTPError as error:
            await self._renew_contact()
            raise OrderUnanswered(f"it doesn't answer: {error!r}") from error
        if answer.is_server_error:
            await self._renew_contact()
            raise OrderUnanswered(sentence_of(answer))
        if answer.is_error:
            raise StartupError(sentence_of(answer))
        return answer.content

    def note_unanswered(self) -> None:
        """Know that an order that another part has given may be carried out late."""
        self._is_unsure = True

    async def settle(self) -> None:
        """Connect again where an order may be carried out late, and return once `told` is of the
        new contact: what was not carried out by then never is. Raises OrderUnanswered."""
        if self._is_unsure:
            await self._renew_contact()
        try:
            async with asyncio.timeout(TOLD_S):
                await self._contacted.wait()
        except TimeoutError as error:
            raise OrderUnanswered(f"it reports nothing within {TOLD_S:g} s") from error

    async def _renew_contact(self) -> None:
        """Connect again where an order may be carried out late: the next contact shows whether."""
        task = self._task
        await cancel_tasks(task)
        if self._task is task and not self._http.is_closed:
            self._is_unsure = False
            self._contacted.clear()
            self.take_event(DeploymentEvent())
            self._task = asyncio.create_task(self._follow(), name=task.get_name())

    async def _follow(self) -> None:
        while True:
            pause_s = RETRY_S
            self._contacted.clear()
            self.token = self.token._replace(contact=self.token.contact + 1)
            events = self._http.stream("GET", f"{ADMIN}/events", headers=self.order_headers)
            try:
                async with events as answer:
                    if answer.is_success:
                        await self._hear(answer)
            except (httpx.HTTPError, OSError):
                pass  # it starts, or it has ended
            except Exception:  # another connection begins with all that it has to say
                log.exception("what a deployment said of its instances could not be taken")
                pause_s = UNFORESEEN_S
            self.take_event(DeploymentEvent())
            self.looked.set()
            await asyncio.sleep(pause_s)

    async def _hear(self, answer: httpx.Response) -> None:
        event = ""
        async for line in answer.aiter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                event = value
            elif field == "data" and event == "instances":
                self.take_event(msgspec.json.decode(value, type=DeploymentEvent))
                self._contacted.set()
                self.looked.set()
            elif field == "data" and event == "migration":
                self._take_move(value)
            elif event == "closed":
                return

    def _take_move(self, value: str) -> None:
        move = msgspec.json.decode(value, type=MoveRecord)
        self.reports.append(move)
        if move.state == "committed":
            self.migrations += 1
            self.moves.append(move)

    def take_event(self, told: DeploymentEvent) -> None:
        """Take an event about its instances."""
        if told != self.told:
            self.told = told
            self._heard.set()
            self._heard.clear()
            self._changed()
        learning = self._learning is not None and not self._learning.done()
        if self.card is None and self.serving and not learning:
            self._learning = asyncio.create_task(self._learn(), name="its model")

    async def _learn(self) -> None:
        """Ask for its model's card; when it has no answer now, it is asked at the next event."""
        try:
            rows = (await self._get("/v1/models", ModelList)).data
            reach = (await self._get(f"{ADMIN}/model", ModelBody)).reach
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            log.warning("a deployment does not describe its model: %r", error)
            return
        for row in rows:
            if row.parent is None:
                known = None
                if reach is not None:
                    known = ModelReach(reach.tokens, reach.longest, reach.media)
                self.card = ModelCard(row.created, row.owned_by, row.max_model_len, known)
                self._changed()
                return

    async def _get(self, path: str, kind: type[Answer]) -> Answer:
        answer = await self._http.get(path, timeout=CARD_S)
        return msgspec.json.decode(answer.raise_for_status().content, type=kind)


def sentence_of(answer: httpx.Response) -> str:
    """What an error answer says."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
