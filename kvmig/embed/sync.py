"""`Migrator` for programs without an event loop: it has one on a thread of its own.

Example:
    with SyncMigrator({"a": engine_a, "b": engine_b}) as migrator:
        migrator.on_loop(lambda: engine_a.connect(on_outputs, on_call_done, on_exit))
        report = migrator.migrate("request-7", "a", "b")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from kvmig.core.config import MigrationConfig
from kvmig.embed.migrator import Migrator, OnCommit
from kvmig.engines.base import Engine
from kvmig.kvtransfer.report import MigrationReport

T = TypeVar("T")


END_S = 10.0
"""Longest wait for the event loop's thread to end."""


class SyncMigrator:
    """Methods are called from any thread but the event loop's."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        config: MigrationConfig | None = None,
        *,
        on_commit: OnCommit = lambda request_id, destination: None,
    ) -> None:
        """As `Migrator`; `on_commit` is called on the event loop's thread."""
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
        """As `Migrator.migrate`. Raises TimeoutError; the migration then goes on."""
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
        """As `Migrator.close`; ends the thread. Close the engines, with `run`, before."""
        if self._loop.is_closed():
            return
        try:
            self.run(self.migrator.close())
        finally:
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise TimeoutError(f"a callback has held the migrator's event loop for {END_S:g} s")
        self._loop.close()
