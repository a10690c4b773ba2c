"""A Unix socket that serves many connections, each by a task of its own."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Awaitable, Callable

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError
from kvmig.process.sockets import take_path

LINE_BYTES = 1 << 16
"""asyncio's own bound of what `readline` takes."""


class UnixServer:
    """`open` it inside a running event loop, then `close` it."""

    def __init__(
        self,
        path: str,
        serve: Callable[[StreamReader, StreamWriter], Awaitable[None]],
        line_bytes: int = LINE_BYTES,
    ) -> None:
        """serve: one connection, which is closed after it. line_bytes: of a line at most."""
        self._path = path
        self._serve = serve
        self._line_bytes = line_bytes
        self._server: asyncio.Server | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Raises ConfigError."""
        try:
            sock = take_path(self._path)
        except OSError as error:
            raise ConfigError(f"{self._path} can't be used: {error}") from error
        self._server = await asyncio.start_unix_server(
            self._connected, sock=sock, limit=self._line_bytes
        )

    async def close(self) -> None:
        """Disconnect all. The socket's file stays, for the next server to take over."""
        if self._server is None:
            return
        self._server.close()
        self._closed = True
        await cancel_tasks(*self._tasks)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            if not self._closed:  # else it is as it should: asyncio would print a traceback
                raise
        finally:
            writer.close()
