"""The launcher's connection to one llumlet: its state goes there, its load comes from there."""

from __future__ import annotations

import asyncio
import logging

from kvmig.controlplane.messages import ClusterMessage, LoadReport, SetState
from kvmig.ground.errors import PeerError, TransportError
from kvmig.kvtransfer.link import Client
from kvmig.kvtransfer.wire import RefusalCounter

RETRY_S = 0.5
"""Between two attempts to connect."""
TICK_S = 1.0
SILENT_TICKS = 10
"""Ticks without a report until a llumlet is ended. Ticks, not seconds: when this process was
held up itself, reports wait for it."""

log = logging.getLogger(__name__)


class LlumletLink:
    """Make it inside a running event loop; `close` it. report: the last one that came."""

    def __init__(
        self, instance: str, endpoint: str, secret: bytes, refusals: RefusalCounter
    ) -> None:
        """refusals: counts what is refused."""
        self.report: LoadReport | None = None
        self._instance = instance
        self._endpoint = endpoint
        self._secret = secret
        self._refusals = refusals
        self._client: Client | None = None
        self._state: SetState | None = None
        self._silent_ticks = 0
        self._task = asyncio.create_task(self._run(), name=f"link to {instance}")

    def set_state(self, state: SetState) -> None:
        """Tell the llumlet, again after every new connection."""
        self._state = state
        self._send_state()

    async def silent(self) -> str:
        """Wait until it has reported nothing for long; says so."""
        while self._silent_ticks < SILENT_TICKS:
            await asyncio.sleep(TICK_S)
            self._silent_ticks += 1
        return f"no report for {SILENT_TICKS * TICK_S:g} s"

    async def close(self) -> None:
        """Disconnect."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            client = Client(
                self._endpoint,
                self._secret,
                "launcher",
                "launcher",
                ClusterMessage,
                refusals=self._refusals,
            )
            self._client = client
            try:
                self._send_state()
                await self._hear(client)
            except TransportError as error:
                log.info("instance %s: %s", self._instance, error)
            finally:
                self._client = None
                client.close()
            await asyncio.sleep(RETRY_S)

    async def _hear(self, client: Client) -> None:
        while True:
            try:
                message, _ = await client.recv()
            except PeerError as error:
                log.warning("ignored from instance %s: %s", self._instance, error)
                continue
            if isinstance(message, LoadReport):
                self.report = message
                self._silent_ticks = 0

    def _send_state(self) -> None:
        if self._client is None or self._state is None:
            return
        try:
            self._client.send(self._state)
        except TransportError as error:
            log.info("instance %s: %s", self._instance, error)  # told again when reconnected
