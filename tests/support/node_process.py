"""One end of a migration in a process of its own, which a test may kill: a fake engine on a GPU of
the tests' own, its sessions, its sockets and its transports."""

from __future__ import annotations

import asyncio
import multiprocessing
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Self
from unittest import mock

from kvmig.core.config import MigrationConfig
from kvmig.kvtransfer.measured import ChunkSizer
from tests.support import fake_gpu
from tests.support.copying_engine import GpuEngine
from tests.support.fake_cluster import Node
from tests.support.waiting import PATIENCE_S, until

CONFIG = MigrationConfig(
    reply_timeout_ms=PATIENCE_S * 1e3,
    lease_ms=4 * PATIENCE_S * 1e3,
    chunk_bytes=4096,
    staging_buffers=4,
)


def one_block() -> AbstractContextManager[object]:
    """Each chunk is of one block while this is entered."""
    return mock.patch.object(ChunkSizer, "blocks", return_value=1)


class NodeProcess:
    """The process, seen from the test; it is killed at the end of a block at the latest."""

    def __init__(self, name: str, device: int, move_to: str = "") -> None:
        """move_to: a destination's endpoint, to which request r moves from here; empty: it is a
        destination itself, whose second scatter never ends."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.node_process", "torch"])
        self.pipe, theirs = context.Pipe()
        order = theirs, name, device, move_to
        self.process = context.Process(target=_serve, args=order, daemon=True)
        self.process.start()
        theirs.close()
        self.endpoint = str(self.hear())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.process.close()
        self.pipe.close()

    def hear(self) -> object:
        """Its next word."""
        assert self.pipe.poll(PATIENCE_S), "the process says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """As `kill -9` does."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()


def _serve(pipe: Connection, name: str, device: int, move_to: str) -> None:
    with fake_gpu.installed(), one_block():
        asyncio.run(_run(pipe, name, device, move_to))


async def _run(pipe: Connection, name: str, device: int, move_to: str) -> None:
    engine = GpuEngine(device)
    node = Node(name, engine, CONFIG)
    held = None if move_to else engine.hold(1)
    pipe.send(node.server.endpoint)
    if held is None:
        engine.start("r")
        await node.migrations.migrate("r", "b", move_to, gateway="g", output_tokens=3)
    else:
        await until(lambda: held.begun.is_set() and engine.asked == 3)
        pipe.send("two chunks are in the engine")
    await asyncio.Event().wait()
