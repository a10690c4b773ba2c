"""Moves requests between engines of this process, on one event loop, for stacks that embed kvmig:
no launcher, HTTP server, Ray or sockets.

Example:
    async with Migrator({"a": engine_a, "b": engine_b}) as migrator:
        report = await migrator.migrate("request-7", "a", "b")
        assert report.state == "committed", report.reason
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

from msgspec.structs import replace

from kvmig.core.config import MigrationConfig
from kvmig.core.errors import ConfigError, TransportError
from kvmig.engines.base import EmittedTokens, Engine, Frame, Frames, OnOutputs
from kvmig.kvtransfer.context import LlumletPort
from kvmig.kvtransfer.measured import slot_bytes
from kvmig.kvtransfer.migrations import MigrationSessions
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.source_machine import EpochCounter
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from kvmig.rpc.messages import RpcMessage

OnCommit = Callable[[str, str], None]
"""(request_id, destination), just before the request runs there: the place to assign it to a
client. May raise MigrationRefused: then it stays where it is."""


class Migrator:
    """Every method is called on the event loop that made it, on which the engines are, too."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: MigrationConfig | None = None,
        *,
        on_commit: OnCommit = lambda request_id, destination: None,
        close_timeout_s: float = 5.0,
    ) -> None:
        """engines: by any names; their maker closes them, after this."""
        self._config = config or MigrationConfig(transport="tcp")
        self._close_timeout_s = close_timeout_s
        self._nodes: dict[str, _Node] = {}
        epochs = EpochCounter()
        try:
            for name, engine in engines.items():
                self._nodes[name] = _Node(
                    name, engine, self._config, self._nodes, epochs, on_commit
                )
        except BaseException:
            for node in self._nodes.values():
                node.free()
            raise

    async def migrate(
        self,
        request_id: str,
        source: str,
        destination: str,
        *,
        inexact: bool = False,
        after_prompt: bool = False,
    ) -> MigrationReport:
        """Move a request; returns the outcome: "committed", or "aborted" with the reason.

        In any case exactly one engine runs the request afterwards. Cancelling the wait
        doesn't stop a migration that has begun; `cancel` does. inexact: it may also go to an engine
        of another numerics class, where its tokens may differ. after_prompt: if its prompt is
        being computed, that is done first, and the blocks of each chunk go meanwhile. Raises
        ConfigError for a name that is no engine's.
        """
        node, there = self._node("source", source), self._node("destination", destination)
        if source == destination:
            raise ConfigError(f"destination is {destination!r}, must be another than the source")
        report = await node.migrations.migrate(
            request_id, destination, destination, inexact=inexact, after_prompt=after_prompt
        )
        if not there.tapped and report.downtime_ms is not None:
            return replace(report, downtime_ms=replace(report.downtime_ms, first_token=None))
        return report

    def cancel(self, request_id: str, reason: str = "aborted_by_client") -> None:
        """Give up the migration of a request that its engine is to abort."""
        for node in self._nodes.values():
            node.migrations.cancel_request(request_id, reason)

    def tap(self, name: str, on_outputs: OnOutputs) -> OnOutputs:
        """`on_outputs` for the engine of this name: migrations see what requests get.

        By it reports know a first token's time, and a migration whose request ends under way is
        given up at once. Without it that is noticed at the migration's next question to the engine;
        an engine that is followed is asked none until `MigrationConfig.reply_timeout_ms`.
        """
        node = self._node("engine", name)
        node.tapped = True

        def heard(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
            on_outputs(client, emitted, frames)
            for entry in emitted:
                node.migrations.stepped(entry.request_id, entry.tokens)
                if entry.finished:
                    node.migrations.cancel_request(entry.request_id, "finished")

        return heard

    async def close(self) -> None:
        """Give up what is under way, and free all that migrations hold. Idempotent."""
        nodes = list(self._nodes.values())
        await asyncio.gather(*(node.migrations.close(self._close_timeout_s) for node in nodes))
        for node in nodes:
            node.free()

    async def __aenter__(self) -> Self:
        try:
            for node in self._nodes.values():
                await node.migrations.get_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def held(self) -> Sequence[str]:
        """What migrations hold now, in words; none when nothing is under way."""
        return [
            f"{name}: {what} {count}"
            for name, node in self._nodes.items()
            for what, count in (
                ("incoming", node.migrations.incoming),
                ("outgoing", node.migrations.outgoing),
                ("staging", node.migrations.staging_used),
            )
            if count
        ]

    def _node(self, role: str, name: str) -> _Node:
        if name not in self._nodes:
            known = ", ".join(self._nodes)
            raise ConfigError(f"{role} is {name!r}, must be one of {known}")
        return self._nodes[name]


class _Node(LlumletPort):
    """One engine and its migrations, whose messages go straight to the others'.

    Endpoints are names here. A message comes with the next turn of the event loop.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        config: MigrationConfig,
        others: Mapping[str, _Node],
        epochs: EpochCounter,
        on_commit: OnCommit,
    ) -> None:
        """others: by name, this one among them once it is made. epochs: shared by all, so that no
        two moves of a request between any engines have the same."""
        self.tapped = False
        """Whether migrations see what requests get here (see `Migrator.tap`)."""
        self._name = name
        self._others = others
        self._on_commit = on_commit
        self._stagings = open_staging(
            config.transport,
            "embedded",
            name,
            config.staging_buffers,
            slot_bytes(config.chunk_bytes, engine.layout),
            TransportSite(gpu=engine.layout.gpu),
        )
        try:
            self.migrations = MigrationSessions(
                name, engine, config, self._stagings, self, epochs=epochs
            )
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Close the staging buffers. Idempotent."""
        for staging in self._stagings.values():
            staging.close()

    def send_to(self, endpoint: str, message: RpcMessage, payload: Frames = ()) -> None:
        """Deliver to another engine's migrations. Raises TransportError if there is none."""
        if endpoint not in self._others:
            raise TransportError(f"{endpoint} is no engine here")
        receive = self._others[endpoint].migrations.receive
        loop = asyncio.get_running_loop()
        loop.call_soon(receive, self._name.encode(), message, _views(payload))

    def reply(self, sender: bytes, message: RpcMessage) -> None:
        """Deliver a destination's answer."""
        receive = self._others[sender.decode()].migrations.receive_reply
        asyncio.get_running_loop().call_soon(receive, self._name, message)

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """The destination's word is final."""
        return await self._others[destination].migrations.fence(request_id, epoch)

    def on_commit(self, request_id: str, epoch: int, output_tokens: int, gateway: str) -> None:
        """Inform the embedding program, which may raise MigrationRefused."""
        self._on_commit(request_id, self._name)
        if not self.tapped:
            # Nobody will say when its first token came: the report doesn't wait for that.
            asyncio.get_running_loop().call_soon(self.migrations.stepped, request_id, 1)


def _views(payload: Frames) -> list[memoryview]:
    return [memoryview(frame) for frame in payload]


T = TypeVar("T")
END_S = 10.0
"""Longest wait for the event loop's thread to end."""


class SyncMigrator:
    """`Migrator` for programs without an event loop: it has one on a thread of its own.

    Methods are called from any thread but the event loop's.

    Example:
        with SyncMigrator({"a": engine_a, "b": engine_b}) as migrator:
            migrator.on_loop(lambda: engine_a.connect(on_outputs, on_call_done, on_exit))
            report = migrator.migrate("request-7", "a", "b")
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: MigrationConfig | None = None,
        *,
        on_commit: OnCommit = lambda request_id, destination: None,
    ) -> None:
        """Arguments as for `Migrator`; `on_commit` is called on the event loop's thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvmig-migrator")
        self._thread.daemon = True
        self._thread.start()
        try:
            self.migrator = self.on_loop(lambda: Migrator(engines, config, on_commit=on_commit))
        except BaseException:
            self._end_loop()
            raise

    def migrate(
        self, request_id: str, source: str, destination: str, timeout_s: float = 60.0
    ) -> MigrationReport:
        """Migrate, as `Migrator.migrate`. Raises TimeoutError; the migration then goes on."""
        return self.run(self.migrator.migrate(request_id, source, destination), timeout_s)

    def on_loop(self, function: Callable[[], T], timeout_s: float = 60.0) -> T:
        """Call `function` on the event loop, where engines are connected and used."""

        async def call() -> T:
            return function()

        return self.run(call(), timeout_s)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Run a coroutine on the event loop to its end. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def close(self) -> None:
        """Close, as `Migrator.close`, and end the thread. Close the engines, with `run`, before."""
        if self._loop.is_closed():
            return
        try:
            self.run(self.migrator.close())
        finally:
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"a callback has held the migrator's event loop for {END_S:g} s")
        self._loop.close()
