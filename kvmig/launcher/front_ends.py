"""Front ends in processes of their own: what each must know, and what keeps them running."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvmig.accounts.usage import UsageSpool
from kvmig.core.background import cancel_tasks
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import StartupError
from kvmig.core.secret import SecretStruct
from kvmig.process.child import end_loading
from kvmig.process.kept_child import KeptChild
from kvmig.process.supervisor import ChildProcess, ProcessPort, running

if TYPE_CHECKING:
    from kvmig.process.fork_server import SharedForks


log = logging.getLogger(__name__)


class FrontLaunch(SecretStruct, frozen=True, kw_only=True):
    """Everything that a front end must know to start (JSON; the secret in base64)."""

    name: str
    """Unique among the front ends of all times: llumlets distinguish them by it."""
    launcher: str
    """The launcher's endpoint."""
    secret: bytes
    admin_key: str = ""
    """The admin API's key; empty: see `kvmig.asgi.access`."""
    whose: str = ""
    """Model and address of the server, for the titles of its processes."""
    config: ClusterConfig
    engine_argv: list[str]
    """MODEL and the engine's flags."""
    listening: int = -1
    """Descriptor of the port's socket, for a front end in a process of its own."""
    heartbeat: int = -1
    """Descriptor for `kvmig.process.child.send_heartbeats`, for such a front end."""


def forget_gauges(folder: Path, pid: int) -> None:
    """Drop what a front end that is gone has set of prometheus_client's gauges.

    What it has counted stays: sums go on.
    """
    for one in folder.glob(f"gauge_*_{pid}.db"):
        one.unlink(missing_ok=True)


MODULE = "kvmig.frontend.process_main"
CLOSE_S = 5.0
"""Time for a front end to close, once nothing runs any more."""


class FrontEnds:
    """Front ends in processes of their own, used like one `FrontEnd`.

    All listen on one socket, so no connection waits for one that is gone. A front end that dies or
    hangs is started again; its streams are over, for their connections were its own.
    """

    def __init__(
        self, launch: FrontLaunch, sock: socket.socket, forks: SharedForks | None = None
    ) -> None:
        """launch: of each front end, without the name. sock: listening; the caller closes it.

        forks: what they are forked from; None: each loads the engine's libraries by itself.
        """
        self._launch = launch
        self._forks = forks
        self._names: dict[int, str] = {}
        self._sock = sock
        self._kept: list[KeptChild] = []
        self._metrics: tempfile.TemporaryDirectory[str] | None = None
        self._environment = dict(os.environ)
        if launch.config.lifecycle.front_ends > 1:  # a single one sums nothing up
            self._metrics = tempfile.TemporaryDirectory(prefix="kvmig-metrics-")
            self._environment["PROMETHEUS_MULTIPROC_DIR"] = self._metrics.name

    async def start(self) -> None:
        """Return once all take requests. Raises StartupError; `close` it then, too."""
        config = self._launch.config
        self._kept = [
            KeptChild(
                f"front end {number}",
                partial(self._begin, number),
                config.start_timeout_s,
                ended=partial(self._clear_after, number),
                unready_s=CLOSE_S,
                again="it starts again",
            )
            for number in range(config.lifecycle.front_ends)
        ]
        await asyncio.gather(*(one.start() for one in self._kept))
        end_loading()

    async def ended(self) -> None:
        """Never: they are started again."""
        await asyncio.Event().wait()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Let all take nothing new; wait for live requests, for the timeout, or for `at_once`."""
        all_ended = asyncio.gather(*(one.drain() for one in self._kept))
        hurry = asyncio.create_task(at_once.wait())
        timeout_s = self._launch.config.shutdown_timeout_s + CLOSE_S
        await asyncio.wait(
            (all_ended, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        await cancel_tasks(all_ended)

    async def close(self) -> None:
        """End all front ends."""
        await asyncio.gather(*(one.stop(CLOSE_S) for one in self._kept))
        if self._metrics is not None:
            self._metrics.cleanup()
        if self._forks is not None:
            self._forks.close()

    async def _begin(self, number: int, heartbeat: int) -> ChildProcess:
        """Start a front end. Raises StartupError."""
        shared = [self._sock.fileno(), heartbeat]
        launch = msgspec.structs.replace(
            self._launch,
            name=f"front-{secrets.token_hex(4)}",
            listening=shared[0],
            heartbeat=heartbeat,
        )
        self._names[number] = launch.name
        return await ChildProcess.start(f"front end {number}", partial(self._spawn, shared), launch)

    async def _spawn(self, shared: list[int], stdin: int, announced: int) -> ProcessPort:
        title = f"of {self._launch.whose}" if self._launch.whose else ""
        if self._forks is not None:
            try:
                descriptors = (stdin, 1, 2, announced, *shared)
                return await self._forks.fork(MODULE, self._environment, descriptors, title)
            except StartupError as error:
                log.warning("%s; a front end starts by itself, which takes longer", error)
        return await running(MODULE, self._environment, shared, title)(stdin, announced)

    def _clear_after(self, number: int, child: ChildProcess) -> None:
        """Drop what a front end has left behind that has ended."""
        if self._metrics is not None:
            forget_gauges(Path(self._metrics.name), child.pid)
        self._leave_spool(self._names[number])

    def _leave_spool(self, name: str) -> None:
        """Let the fleet's server know that this front end's spool is not written any more."""
        if not (folder := self._launch.config.http.usage_spool):
            return
        try:
            UsageSpool(Path(folder, f"{name}.sqlite")).mark_left()
        except OSError as error:  # then it is counted to its end when the deployment ends
            log.warning("%s", error)
