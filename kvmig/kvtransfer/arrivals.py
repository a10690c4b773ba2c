"""Migrations into one instance: those under way, and tombstones of those that have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from kvmig.engines.base import Engine, Tail
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import MigrationRefused, PeerError
from kvmig.kvtransfer.admission import admit, kv_bytes
from kvmig.kvtransfer.arrival_events import Cancel, Fence
from kvmig.kvtransfer.copier import Send
from kvmig.kvtransfer.destination_actions import Action, Answer
from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.destination_session import DestinationSession
from kvmig.kvtransfer.messages import (
    Abort,
    Bundle,
    Chunk,
    Commit,
    Expect,
    Message,
    Reserve,
)
from kvmig.kvtransfer.refusals import Refusals
from kvmig.kvtransfer.tombstones import Tombstones
from kvmig.kvtransfer.transports.select import Inboxes, site_of

OnCommit = Callable[[str, int, int, str], None]
"""(request_id, epoch, num_output_tokens, gateway), before the engine can emit a token."""


class Arrivals:
    """The incoming half of `Migrations`."""

    def __init__(
        self,
        engine: Engine,
        config: MigrationConfig,
        on_commit: OnCommit,
        on_commit_failed: Callable[[str], None],
        on_broken: Callable[[Exception], None],
        refusals: Refusals,
        has_front: Callable[[str], bool],
    ) -> None:
        """on_broken: a migration ended with an error that nothing was made for.

        has_front: whether the front end of this name is connected here.
        refusals: counts strangers at the transports' own sockets.
        """
        self._engine = engine
        self._config = config
        self._on_commit = on_commit
        self._on_commit_failed = on_commit_failed
        self._on_broken = on_broken
        self._has_front = has_front
        self._inboxes = Inboxes(config.transport, site_of(config, refusals))
        self._live: dict[str, DestinationSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tombstones = Tombstones()
        self._unstepped: dict[str, DestinationSession] = {}
        self.committed = 0
        """Requests that came, ever."""

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that come just now."""
        return [session.request_id for session in self._live.values()]

    def receive(
        self, message: Message, payload: list[memoryview], send: Send, refusal: str = ""
    ) -> None:
        """A message of a source, to be answered with `send`.

        refusal: why a new migration can't begin, if it can't.
        """
        match message:
            case Bundle(chunks):
                for chunk in chunks:
                    self.receive(chunk, _part(payload, chunk), send)
                return
            case Expect(mid, ms):
                if mid in self._live:
                    self._live[mid].expect(ms)
                return
            case Reserve() | Chunk() | Commit() | Abort():
                mid = message.mid
            case _:
                raise PeerError(f"{type(message).__name__} isn't for a migration's destination")
        if mid in self._live:
            self._live[mid].deliver(message, payload)
        elif (
            isinstance(message, Reserve)
            and message.export is not None
            and not self._tombstones.knows(mid)
        ):
            request = replace(message.export, payload=[bytes(frame) for frame in payload])
            self._begin(replace(message, export=request), send, refusal)
        else:
            _answer(self._tombstones.answer(mid, message), send)

    async def fence(self, request_id: str, epoch: int) -> bool:
        """Whether this attempt is committed; if not, it never will be.

        Raises TimeoutError when a commit under way takes longer than a lease.
        """
        key = (request_id, epoch)
        for session in self._live.values():
            if session.attempt == key:
                answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                session.deliver(Fence(answer))
                async with asyncio.timeout(self._config.lease_ms / 1e3):
                    return await answer
        return self._tombstones.fence(key)

    def cancel(self, request_id: str, reason: str) -> None:
        """The request isn't wanted any more."""
        self._unstepped.pop(request_id, None)
        for session in self._live.values():
            if session.request_id == request_id:
                session.deliver(Cancel(reason))

    def stepped(self, request_id: str) -> None:
        """The request got a token here; only the first after a commit is told."""
        session = self._unstepped.pop(request_id, None)
        if session is not None:
            session.first_token()

    async def close(self, timeout_s: float) -> None:
        """Give all up that aren't committed; free what was mapped."""
        for session in self._live.values():
            session.deliver(Cancel("shutdown"))
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._inboxes.close()

    def _begin(self, message: Reserve, send: Send, refusal: str) -> None:
        key = (message.request_id, message.epoch)
        try:
            self._check_in(message, "superseded" if self._tombstones.used(key) else refusal)
        except MigrationRefused as error:
            machine = DestinationMachine(message.mid)
            _answer(machine.failed(error.reason, error.detail), send)
            self._tombstones.bury(machine, key)
            return
        older = [
            self._tasks[mid]
            for mid, session in self._live.items()
            if session.request_id == message.request_id
        ]
        self.cancel(message.request_id, "superseded")
        session = DestinationSession(
            message,
            self._engine,
            self._config,
            self._inboxes,
            send,
            self._commits,
            self._commit_failed,
        )
        self._live[message.mid] = session
        task = asyncio.create_task(self._run(session, older), name=f"in {message.mid}")
        task.add_done_callback(self._over)
        self._tasks[message.mid] = task

    def _check_in(self, message: Reserve, refusal: str) -> None:
        """Raises MigrationRefused if the request must not come now."""
        if refusal:
            raise MigrationRefused(refusal)
        if self._engine.unmovable:
            raise MigrationRefused("unsupported", f"nothing can come: {self._engine.unmovable}")
        if not self._has_front(message.gateway):
            raise MigrationRefused(
                "incompatible", f"front end {message.gateway} is not connected here"
            )
        layout = self._engine.layout
        under_way = [
            kv_bytes(session.opening.num_tokens, layout)
            for session in self._live.values()
            if session.request_id != message.request_id
        ]
        admit(self._config, "in", under_way, kv_bytes(message.num_tokens, layout))

    async def _run(self, session: DestinationSession, older: list[asyncio.Task[None]]) -> None:
        mid = session.machine.key
        try:
            # An engine holds one reservation a request: the older one goes first.
            await asyncio.gather(*older, return_exceptions=True)
            await session.run()
            self.committed += session.machine.committed_here
        finally:
            del self._live[mid], self._tasks[mid]
            self._tombstones.bury(session.machine, session.attempt)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_broken(error)

    def _commits(self, session: DestinationSession, tail: Tail) -> None:
        opening = session.opening
        self._on_commit(opening.request_id, opening.epoch, tail.num_output_tokens, opening.gateway)
        self._unstepped[opening.request_id] = session

    def _commit_failed(self, session: DestinationSession) -> None:
        self._unstepped.pop(session.request_id, None)
        self._on_commit_failed(session.request_id)


def _part(payload: list[memoryview], chunk: Chunk) -> list[memoryview]:
    """The chunk's bytes, if they came with the message."""
    return [frame[chunk.offset : chunk.offset + chunk.nbytes] for frame in payload]


def _answer(actions: list[Action], send: Send) -> None:
    for action in actions:
        if isinstance(action, Answer):
            send(action.message, ())
