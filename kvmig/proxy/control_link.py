"""The connection of a proxy to the fleet's server: a Unix socket, messages with their length.

The server sends a snapshot first, then what changes. A proxy connects again whenever the
connection ends, and goes on meanwhile with what it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from kvmig.core.background import UNFORESEEN_S, cancel_tasks
from kvmig.process.unix_server import UnixServer
from kvmig.proxy.messages import Down, ProxyHello, ProxyNews
from kvmig.rpc.unix_stream import receive_message, send_message

UNSENT_BYTES = 1 << 28
"""Bytes at which a proxy that reads nothing is disconnected; it begins again with a snapshot."""
RETRY_S = 0.2
HELLO_S = 10.0

log = logging.getLogger(__name__)


class ProxyLinks:
    """The server's end, for all proxies. `open` it inside a running event loop, then `close` it."""

    def __init__(
        self,
        path: str,
        first: Callable[[], Sequence[Down]],
        receive: Callable[[str, ProxyNews | None], None],
    ) -> None:
        """path: of the socket. first: the first messages to a proxy.

        receive: is called with a proxy's name and each of its messages, and with None at the end
        of its connection.
        """
        self._first = first
        self._receive = receive
        self._server = UnixServer(path, self._serve)
        self._writers: dict[str, asyncio.StreamWriter] = {}
        self.open = self._server.open
        """Raises ConfigError."""
        self.close = self._server.close
        """Disconnects all. The socket's file stays, for the next server to take over."""

    def send_to_all(self, message: Down) -> None:
        """Send a message to all proxies."""
        for name, writer in list(self._writers.items()):
            self._send(name, writer, message)

    def _send(self, name: str, writer: asyncio.StreamWriter, message: Down) -> None:
        send_message(writer, message)
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            log.warning("proxy %s reads nothing", name)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            async with asyncio.timeout(HELLO_S):
                name = (await receive_message(reader, ProxyHello)).proxy
            self._writers[name] = writer
            for message in self._first():
                self._send(name, writer, message)
            while True:
                self._receive(name, await receive_message(reader, ProxyNews))
        except (EOFError, ConnectionError, TimeoutError):
            pass  # it has gone
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("proxy %s: %s", name or "?", error)
        finally:
            if self._writers.get(name) is writer:
                del self._writers[name]
                self._receive(name, None)


class ServerLink:
    """A proxy's end. Make it inside a running event loop; `close` it."""

    def __init__(self, path: str, name: str, receive: Callable[[Down], None]) -> None:
        """path: of the server's socket. name: the proxy's.

        receive: is called with each message of the server.
        """
        self._path = path
        self._name = name
        self._receive = receive
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run(), name="link to the server")

    @property
    def connected(self) -> bool:
        """Whether the server is there."""
        return self._writer is not None

    def send(self, message: ProxyNews) -> None:
        """Send a message to the server; lost while it isn't there, or reads nothing: it is sent
        again."""
        if self._writer is not None and not self._writer.transport.get_write_buffer_size():
            send_message(self._writer, message)

    async def close(self) -> None:
        """Disconnect."""
        await cancel_tasks(self._task)

    async def _run(self) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            pause_s = RETRY_S
            try:
                send_message(writer, ProxyHello(self._name))
                while True:
                    self._receive(await receive_message(reader, Down))
                    self._writer = writer  # what is said counts from this server's snapshot on
            except (EOFError, ConnectionError):
                pass  # another server will be there
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("the server: %s", error)
            except Exception:  # a new connection begins with all that the server knows
                log.exception("what the server sent could not be taken")
                pause_s = UNFORESEEN_S
            finally:
                self._writer = None
                writer.close()
            await asyncio.sleep(pause_s)
