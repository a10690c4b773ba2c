"""Moves requests between engines of this process, on one event loop.

Example:
    async with Migrator({"a": engine_a, "b": engine_b}) as migrator:
        report = await migrator.migrate("request-7", "a", "b")
        assert report.state == "committed", report.reason
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from kvmig.embed.node import Node
from kvmig.engines.base import Emitted, Engine, Frame, OnOutputs
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import ConfigError
from kvmig.kvtransfer.report import MigrationReport

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
        """engines: by any names; whoever made them closes them, after this."""
        self._config = config or MigrationConfig(transport="tcp")
        self._close_timeout_s = close_timeout_s
        self._nodes: dict[str, Node] = {}
        self._tapped: set[str] = set()
        try:
            for name, engine in engines.items():
                told = partial(self._committing, name, on_commit)
                self._nodes[name] = Node(name, engine, self._config, self._nodes, told)
        except BaseException:
            for node in self._nodes.values():
                node.free()
            raise

    async def migrate(
        self, request_id: str, source: str, destination: str, *, inexact: bool = False
    ) -> MigrationReport:
        """Move a request, and say how it ended: "committed", or "aborted" with the reason.

        Whatever happens, exactly one engine runs the request afterwards. Cancelling the wait
        doesn't stop a migration that has begun; `cancel` does. inexact: it may also go to an engine
        of another numerics class, where its tokens may differ. Raises ConfigError for a name
        that is no engine's.
        """
        node, _ = self._node("source", source), self._node("destination", destination)
        if source == destination:
            raise ConfigError(f"destination is {destination!r}, must be another than the source")
        report = await node.migrations.migrate(
            request_id, destination, destination, inexact=inexact
        )
        if destination not in self._tapped and report.downtime_ms is not None:
            return replace(report, downtime_ms=replace(report.downtime_ms, first_token=None))
        return report

    def cancel(self, request_id: str, reason: str = "aborted_by_client") -> None:
        """Give up what moves of a request, which its engine was told to abort."""
        for node in self._nodes.values():
            node.migrations.cancel_request(request_id, reason)

    def tap(self, name: str, on_outputs: OnOutputs) -> OnOutputs:
        """`on_outputs` for the engine of this name: migrations hear what requests get.

        By it reports know a first token's time, and a migration whose request ends under way is
        given up at once. Without it that is noticed at the migration's next question to the engine;
        an engine that is followed is asked none until `MigrationConfig.reply_timeout_ms`.
        """
        node = self._node("engine", name)
        self._tapped.add(name)

        def heard(client: int, emitted: list[Emitted], frames: list[Frame]) -> None:
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
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def _committing(self, name: str, on_commit: OnCommit, request_id: str) -> None:
        on_commit(request_id, name)
        if name not in self._tapped:
            # Nobody will say when its first token came: the report doesn't wait for that.
            migrations = self._nodes[name].migrations
            asyncio.get_running_loop().call_soon(migrations.stepped, request_id, 1)

    def _node(self, role: str, name: str) -> Node:
        if name not in self._nodes:
            known = ", ".join(self._nodes)
            raise ConfigError(f"{role} is {name!r}, must be one of {known}")
        return self._nodes[name]
