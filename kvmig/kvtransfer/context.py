"""The surroundings of migrations: their host, and the context that those out of it share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import MigrationConfig
from kvmig.engines.base import Engine
from kvmig.kvtransfer.bandwidth import BandwidthThrottle
from kvmig.kvtransfer.measured import BlockRate, ChunkSizer, LeadTime, PauseTime, slot_bytes
from kvmig.kvtransfer.transports.base import StagingPool
from kvmig.rpc.codec import Frames
from kvmig.rpc.messages import RpcMessage


class LlumletPort(Protocol):
    """The llumlet, as its migrations see it. Called on the event loop; must not block.

    The methods with a body are those that a program without front ends needn't have.
    """

    def send_to(self, endpoint: str, message: RpcMessage, payload: Frames, /) -> None:
        """Send to the llumlet at an endpoint. Raises TransportError if it is gone."""
        ...

    def reply(self, sender: bytes, message: RpcMessage, /) -> None:
        """Answer a sender of `MigrationSessions.receive`. Raises TransportError if it is gone."""
        ...

    async def resolve(self, mid: str, request_id: str, epoch: int, destination: str) -> bool:
        """Ask the front end whether the request moved: the destination doesn't answer.

        Raises when no process knows. May wait without end: each question has a reply's time-out.
        """
        ...

    def on_commit(self, request_id: str, epoch: int, output_tokens: int, gateway: str) -> None:
        """A request is about to start here; its engine can't emit a token before.

        May raise MigrationRefused.
        """
        ...

    def on_commit_failed(self, request_id: str) -> None:
        """Undo `on_commit`."""
        return

    def on_left(self, request_id: str, endpoint: str) -> None:
        """A request runs at `endpoint` from now on."""
        return

    def on_no_memory(self, error: MemoryError) -> None:
        """A migration ended anywhere, maybe between a state and its actions.

        It may hold blocks still, and what it answers needn't be true.
        """
        return

    def has_front(self, gateway: str) -> bool:
        """Whether a front end is connected; requests of others are refused before any copy."""
        return True

    def announce_pause(self, request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        """Announce the pause to the front end, so that it spreads it.

        Returns False if none was informed: then the pause isn't spread.
        """
        return False


@dataclass
class SourceContext:
    """Shared by all migrations out of one instance: engine, buffers, bandwidth, measurements."""

    host: LlumletPort
    engine: Engine
    config: MigrationConfig
    stagings: Mapping[str, StagingPool]
    """Staging buffers by transport's name, the best first; all are offered."""
    clock: TimeSource = monotonic
    places: asyncio.Semaphore = field(init=False)
    """Places for as many migrations as may go at once."""
    throttle: BandwidthThrottle = field(init=False)
    sizer: ChunkSizer = field(init=False)
    rate: BlockRate = field(init=False)
    lead: LeadTime = field(default_factory=LeadTime)
    pauses: PauseTime = field(default_factory=PauseTime)

    def __post_init__(self) -> None:
        config, layout = self.config, self.engine.layout
        block_bytes, slot = layout.block_bytes, slot_bytes(config.chunk_bytes, layout)
        self.places = asyncio.Semaphore(config.max_migrations)
        self.throttle = BandwidthThrottle(
            config.max_bandwidth, config.max_pair_bandwidth, config.lease_ms / 2e3
        )
        self.sizer = ChunkSizer(block_bytes, slot, config.chunk_ms)
        self.rate = BlockRate(block_bytes)

    @property
    def timeout_s(self) -> float:
        """How long an answer, or a call of the engine, may take."""
        return self.config.reply_timeout_ms / 1e3
