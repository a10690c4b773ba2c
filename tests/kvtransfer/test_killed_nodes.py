"""One end of a migration between two GPUs is killed while two chunks are in the destination's
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvmig.kvtransfer.migrations import END_S
from kvmig.kvtransfer.transports.select import LOOK_S
from tests.support import fake_gpu
from tests.support.copying_engine import GpuEngine
from tests.support.fake_cluster import SLACK_S, Node
from tests.support.node_process import CONFIG, NodeProcess, one_block
from tests.support.skipped_time import skipped_time
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all comes back."""

SHARED_BYTES = 2 << 20
"""The least that processes share of a GPU's memory; a fake engine has less of its own."""


@pytest.fixture
def engine(gpus: None, request: pytest.FixtureRequest) -> Iterator[GpuEngine]:
    """On the GPU of that number."""
    with one_block():
        made = GpuEngine(request.param)
        yield made
        made.close()


def shared() -> int:
    """Pieces of memory that this process shares, or has from another one."""
    return sum(size >= SHARED_BYTES for size in fake_gpu.sizes())


@pytest.mark.parametrize("engine", [1], indirect=True)
async def test_a_source_that_is_killed_leaves_no_block_reserved_and_no_inbox(
    engine: GpuEngine,
) -> None:
    held, node = engine.hold(1), Node("b", engine, CONFIG)
    own = shared()
    with skipped_time() as skip, NodeProcess("a", 0, move_to=node.server.endpoint) as source:
        await until(held.begun.is_set)
        await until(lambda: engine.asked == 3)
        source.kill()
        held.go_on.set()
        await until(lambda: engine.inside == 0)
        assert engine.watched.over >= 3
        assert shared() == own + 1
        while node.migrations.incoming:  # each chunk that has come begins the lease again
            skip(CONFIG.lease_ms / 1e3 + SLACK_S)
            await asyncio.sleep(0.01)
        assert engine.is_clean()
        skip(LOOK_S + SLACK_S)
        await until(lambda: shared() == own)
        await node.close()
    assert engine.watched.strayed == []


@pytest.mark.parametrize("engine", [0], indirect=True)
async def test_a_destination_that_is_killed_leaves_the_request_here_and_nothing_of_its_memory(
    engine: GpuEngine,
) -> None:
    engine.start("r")
    node = Node("a", engine, CONFIG)
    own = shared()
    with skipped_time() as skip, NodeProcess("b", 1) as there:
        move = node.migrations.migrate("r", "b", there.endpoint, gateway="g", output_tokens=3)
        moving = asyncio.create_task(move)
        await asyncio.to_thread(there.hear)
        assert shared() == own + 1
        there.kill()
        report = await moving
        assert (report.state, report.reason) == ("aborted", "peer_lost")
        assert not engine.running["r"].suspended
        assert node.migrations.staging_used == 0
        skip(END_S + SLACK_S)
        await until(lambda: shared() == own)
        await node.close()
