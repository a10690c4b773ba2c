"""One engine of a `Migrator`: its migrations, whose messages go straight to the others'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvmig.engines.base import Engine
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.context import Host
from kvmig.kvtransfer.measured import slot_bytes
from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.migrations import Migrations
from kvmig.kvtransfer.transports.select import open_staging
from kvmig.kvtransfer.wire import Frame


class Node(Host):
    """Endpoints are names here. A message comes with the next turn of the event loop."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        config: MigrationConfig,
        others: Mapping[str, Node],
        on_commit: Callable[[str], None],
    ) -> None:
        """others: by name, this one among them once it is made."""
        self._name = name
        self._others = others
        self._on_commit = on_commit
        self._stagings = open_staging(
            config.transport,
            "embedded",
            name,
            config.staging_chunks,
            slot_bytes(config.chunk_bytes, engine.layout.block_bytes),
        )
        try:
            self.migrations = Migrations(name, engine, config, self._stagings, self)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Close the staging buffers. Idempotent."""
        for staging in self._stagings.values():
            staging.close()

    def send_to(self, endpoint: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Deliver to another engine's migrations. Raises TransportError if there is none."""
        if endpoint not in self._others:
            raise TransportError(f"{endpoint} is no engine here")
        receive = self._others[endpoint].migrations.receive
        loop = asyncio.get_running_loop()
        loop.call_soon(receive, self._name.encode(), message, _views(payload))

    def reply(self, sender: bytes, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Deliver a destination's answer."""
        receive = self._others[sender.decode()].migrations.receive_reply
        loop = asyncio.get_running_loop()
        loop.call_soon(receive, self._name, message, _views(payload))

    def on_commit(self, request_id: str, epoch: int, output_tokens: int, gateway: str) -> None:
        """Tell the embedding program."""
        self._on_commit(request_id)

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """The destination's word is final."""
        return await self._others[destination].migrations.fence(request_id, epoch)


def _views(payload: Sequence[Frame]) -> list[memoryview]:
    return [memoryview(frame) for frame in payload]
