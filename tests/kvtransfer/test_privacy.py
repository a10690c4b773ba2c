"""A request's KV goes into blocks that were reserved for it: all others stay as they are.

The destination's memory is written by the kernel that an engine has, and every byte of it that
is nobody's is random.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvmig.core.config import Transport
from kvmig.core.errors import MigrationRefused
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.base import RequestExport, RequestTail
from kvmig.engines.block_copies import BlockCopies
from kvmig.kvtransfer.messages import (
    Aborted,
    Chunk,
    Commit,
    PeerMessage,
    Refused,
    Reserve,
    Reserved,
    TransportOffer,
)
from kvmig.kvtransfer.transports import tcp
from kvmig.rpc.zmq_sockets import RpcClient
from tests.support.fake_cluster import SECRET, cluster, failing
from tests.support.fake_engine import BLOCK_BYTES, BLOCK_TOKENS, FakeEngine, kv

MOVED = "r"


class Neighbours(FakeEngine):
    """A destination that knows which blocks a moved request was ever given for its own."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.memory[:] = os.urandom(len(self.memory))
        self._bytes = np.frombuffer(self.memory, np.uint8)
        region = BlockRegion(self._bytes.ctypes.data, BLOCK_BYTES, BLOCK_BYTES)
        blocks = self.layout.num_blocks
        self._copies = BlockCopies(KVLayout((region,), blocks, BLOCK_TOKENS, "m"))
        self._given: set[int] = set()
        self.start("neighbour")
        self._before = self._bytes.copy()

    async def reserve(self, export: RequestExport) -> int:
        hits = await super().reserve(export)
        # The prefix cache's: shared, so nobody may write there any more.
        for block in self.reserved[MOVED].blocks:
            self._before[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = self._block(block)
        return hits

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        blocks = await super().grow(request_id, num_tokens)
        self._given.update(blocks[self.hits :])
        return blocks

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        await self._enter("scatter")
        await self._copies.scatter(block_ids, fused, urgent)
        return await super().scatter(block_ids, fused, urgent)

    def _block(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def assert_alone(self) -> None:
        """No byte but those of the moved request's own blocks has changed."""
        changed = np.flatnonzero(self._bytes != self._before) // BLOCK_BYTES
        assert set(changed.tolist()) <= self._given
        self._copies.close()


ENDS: list[tuple[str, int, str]] = [
    ("nothing", 0, "committed"), ("reserve", 0, "aborted"), ("grow", 1, "aborted"),
    ("scatter", 0, "aborted"), ("scatter", 3, "aborted"), ("commit", 0, "aborted"),
]  # fmt: skip


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("method", "after", "state"), ENDS)
async def test_a_migration_however_it_ends_changes_no_block_but_its_own(
    method: str, after: int, state: str, transport: Transport
) -> None:
    there = Neighbours(hits=3)
    there.before = failing(method, MigrationRefused("error", "as told"), after)
    async with cluster(
        destination=there, transport=transport, stages=3, chunks=2,
    ) as them:  # fmt: skip
        report = await them.move()
        assert report.state == state
        there.before = FakeEngine()._nothing
    there.assert_alone()


async def test_a_client_that_leaves_in_the_midst_leaves_others_blocks_alone() -> None:
    there = Neighbours(hits=3)
    async with cluster(destination=there, chunks=1) as them:
        scattering = asyncio.Event()

        async def before(method: str) -> None:
            if method == "scatter":
                scattering.set()
                await asyncio.sleep(0.01)

        there.before = before
        moving = asyncio.create_task(them.move())
        await scattering.wait()
        them.a.migrations.cancel_request(MOVED, "aborted_by_client")
        assert (await moving).state == "aborted"
        there.before = FakeEngine()._nothing
    there.assert_alone()


HITS, PROMPT = 3, 41
OWN = PROMPT // BLOCK_TOKENS + 1
FORGED: dict[str, tuple[int, int, int]] = {
    # first block, checksums, bytes sent for each in blocks
    "shared": (0, 1, 1),
    "the last that is shared": (HITS - 1, 2, 1),
    "before the first": (-1, 1, 1),
    "far before the first": (-(10**9), 1, 1),
    "beyond the next": (HITS + 1, 1, 1),
    "far beyond": (10**9, 1, 1),
    "more than there are": (HITS, 1000, 1),
    "none": (HITS, 0, 1),
    "fewer bytes than blocks": (HITS, 2, 0),
}


@pytest.mark.parametrize("with_commit", [False, True], ids=["chunk", "commit"])
@pytest.mark.parametrize("name", FORGED)
async def test_a_forged_chunk_writes_to_no_block_of_others(name: str, with_commit: bool) -> None:
    first, count, each = FORGED[name]
    there = Neighbours(hits=HITS)
    tokens = list(range(PROMPT + 1))
    payload = [msgspec.msgpack.encode((tokens, PROMPT))]
    async with cluster(destination=there) as them:
        peer = RpcClient(them.b.server.endpoint, SECRET, "peer", "forger", PeerMessage)
        try:
            async with asyncio.timeout(10):
                peer.send(
                    Reserve(
                        "m", MOVED, 1, 0, PROMPT, RequestExport(MOVED, len(tokens), []),
                        model=there.layout.fingerprint, offers=[TransportOffer(tcp.NAME)],
                        numerics=there.numerics,
                    ),
                    payload,
                )  # fmt: skip
                reserved, _ = await peer.recv()
                assert isinstance(reserved, Reserved)
                data = b"".join(kv(tokens, position) for position in range(BLOCK_TOKENS)) * (
                    count * each
                )
                chunk = Chunk("m", 0, first, -1, count * BLOCK_BYTES, [0] * count)
                if with_commit:
                    state = msgspec.msgpack.encode(tokens)
                    tail = RequestTail([], len(tokens), 1, state)
                    peer.send(Commit("m", MOVED, 1, tail, blocks=-1, last=chunk), [data])
                else:
                    peer.send(chunk, [data])
                answer, _ = await peer.recv()
                assert isinstance(answer, Refused | Aborted), answer
        finally:
            peer.close()
    there.assert_alone()
