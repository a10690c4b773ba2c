"""A real vLLM engine whose KV cache lies in pages of a GPU of the tests' own, which come and go
with its quota while it serves: what it computes is what one that is left alone computes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvmig.engines.vllm import balloon as balloons
from kvmig.engines.vllm import device_sharing
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.vmm import AddressRange
from tests.support import fake_gpu
from tests.support.balloons import balloon, resize, settled
from tests.support.vllm_pair import LONG, PROMPT, SEEDED, Engines, Pair, assert_same
from tests.support.vllm_side import AS_SERVED, Configuration, Output, Side

pytestmark = pytest.mark.engine

LAYERS, PAGE = 4, 2 << 20
GROUP = LAYERS * PAGE
"""Bytes of a group: 128 blocks, of 16 KiB a layer."""
GROUPS = 4
FLAGS = ("--num-gpu-blocks-override=544", AS_SERVED)
"""32 blocks more than fill pages."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="sync"), pytest.param(True, id="async", marks=pytest.mark.long)],
)
def sides(engines: Engines, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    from tests.support.gpu_worker import count_as_gpus, take_pages_of_gpus

    engines.close()  # the first that ends takes vLLM's process groups along
    with ExitStack() as held:
        held.enter_context(fake_gpu.installed())
        patch = held.enter_context(pytest.MonkeyPatch.context())
        gpu = CudaDriver(0)
        held.callback(gpu.destroy_stream, count_as_gpus(patch, gpu))
        take_pages_of_gpus(patch)
        wanted = Configuration(async_scheduling=request.param, flags=FLAGS, shared=True)
        made = []
        for _ in range(2):
            made.append(Side(wanted))
            held.callback(ended, made[-1])
        yield made[0], made[1]


def ended(side: Side) -> None:
    side.close()
    addresses(side).close()


@pytest.fixture
async def pair(sides: tuple[Side, Side]) -> AsyncIterator[Pair]:
    """Both with two groups of memory."""
    pair = Pair(*sides)
    pair.begin()
    for side in sides:
        await resized(side, 1)
        await resized(side, 2)  # free blocks of the first group are used first
    yield pair
    await pair.assert_empty()


def addresses(side: Side) -> AddressRange:
    found = side.device.addresses
    assert found is not None
    return found


def there(side: Side) -> int:
    """Bytes of the GPU that its cache has; each of these pages is another one."""
    found = addresses(side)
    pieces = fake_gpu.pieces_of(os.getpid(), range(found.address, found.address + found.size))
    assert len(set(pieces)) == len(pieces)
    return len(pieces) * PAGE


async def resized(side: Side, groups: int, patience_s: float = 60.0) -> None:
    """What the cache has is what it says."""
    await resize(side, groups * GROUP, GROUPS * GROUP, patience_s)
    assert there(side) == balloon(side).use.lease


async def cache_settled(side: Side) -> None:
    await settled(side)
    assert there(side) == balloon(side).use.lease


async def test_its_blocks_fill_pages_which_are_there_as_its_quota_says(pair: Pair) -> None:
    side = pair.a
    room = balloon(side).room
    assert (room.granule, room.capacity, room.floor) == (GROUP, GROUPS * GROUP, GROUP)
    assert there(side) == 2 * GROUP
    for groups in (GROUPS, 1, 3):
        await resized(side, groups)
        assert there(side) == groups * GROUP
        assert side.engine.load().total_blocks == groups * 128 - 1


@pytest.mark.long
async def test_a_request_computes_the_same_while_pages_come_and_go(pair: Pair) -> None:
    alone = await pair.unmoved(PROMPT, **SEEDED)
    pair.submit(pair.a, "one", PROMPT, **SEEDED)
    sizes = random.Random(3)
    while pair.outputs.get("one") is None or pair.outputs["one"].finish_reason is None:
        await resized(pair.a, sizes.choice([1, 2, GROUPS]))
        for _ in range(3):
            pair.a.step()
        await pair.settle()
    assert_same(pair.outputs["one"], alone)


async def test_a_request_moves_between_engines_whose_pages_come_and_go(pair: Pair) -> None:
    alone = await pair.unmoved(LONG)
    await pair.run(pair.a, "moved", LONG, until=10)
    await resized(pair.b, 1)
    await pair.move(pair.a, pair.b, "moved")
    await resized(pair.a, 1)
    await resized(pair.b, GROUPS)
    await pair.step(pair.b, until=("moved", 30))
    await resized(pair.a, 3)
    await pair.move(pair.b, pair.a, "moved")
    await resized(pair.b, 1)
    assert_same(await pair.finish("moved"), alone)
    assert there(pair.b) == GROUP, "what it held is gone from there"


STEPS = 4
NAMES = ["first", "second", "third", "last"]


async def full(pair: Pair) -> dict[str, Output]:
    """Four requests on `a` which hold a group's blocks and some of another's, those all the last
    one's; gives what each computes alone."""
    prompts = {
        name: [token + number for token in (*LONG, *LONG[:500])]
        for number, name in enumerate(NAMES)
    }
    alone = {name: await pair.unmoved(prompt) for name, prompt in prompts.items()}
    pair.begin()
    for name, prompt in prompts.items():
        pair.submit(pair.a, name, prompt)
    await pair.step(pair.a, until=(NAMES[-1], 5))
    assert pair.a.used_blocks > 128
    return alone


async def given_back(side: Side) -> None:
    """All but one group, in a step, and the end of those in flight."""
    for _ in range(STEPS):
        side.step()
    await cache_settled(side)
    assert there(side) == GROUP


@pytest.mark.long
async def test_after_its_patience_requests_are_preempted_until_its_pages_can_go(
    pair: Pair,
) -> None:
    alone = await full(pair)
    await resized(pair.a, 1, patience_s=0.0)
    await given_back(pair.a)
    left = [one.request_id for one in pair.a.scheduler.running]
    assert left == NAMES[: len(left)]
    assert len(left) < len(NAMES)
    for name in NAMES:
        assert (await pair.finish(name)).tokens == alone[name].tokens


@pytest.mark.long
async def test_the_last_request_is_preempted_too_where_it_holds_blocks_of_too_many_pages(
    pair: Pair,
) -> None:
    alone = await full(pair)
    pair.a.engine.abort(NAMES[:3])
    for _ in range(STEPS):
        pair.a.step()
    assert pair.a.used_blocks < 64
    await resized(pair.a, 1, patience_s=60.0)
    assert there(pair.a) == 2 * GROUP
    await resized(pair.a, 1, patience_s=0.0)
    await given_back(pair.a)
    assert (await pair.finish(NAMES[3])).tokens == alone[NAMES[3]].tokens


async def test_an_engine_goes_on_with_what_it_has_where_the_gpu_has_no_memory_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = await pair.unmoved(PROMPT)
    await resized(pair.a, 1)
    pair.submit(pair.a, "one", PROMPT)
    monkeypatch.setattr(balloons, "SHORT_S", 0.1)
    fake_gpu.fail("cuMemCreate")
    await resized(pair.a, GROUPS)
    assert there(pair.a) == GROUP
    assert "3 groups of blocks got no memory: cuMemCreate" in caplog.text
    assert_same(await pair.finish("one"), alone)
    said = len(caplog.records)
    pair.a.take_calls()
    assert len(caplog.records) == said, "it asks now and then, not at each step"
    fake_gpu.fail("")
    await asyncio.sleep(0.1)
    await resized(pair.a, GROUPS)
    assert there(pair.a) == GROUPS * GROUP


@pytest.mark.long
async def test_as_much_comes_as_the_gpu_has(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    await resized(pair.a, 1)
    real, left = AddressRange.map_pages, [10]

    def mapped(at: AddressRange, pages: Any) -> None:
        fake_gpu.fail("" if left[0] > 0 else "cuMemCreate")
        real(at, pages)
        left[0] -= 1

    def dropped(at: AddressRange, pages: Any) -> None:
        before = len(at.there)
        drop(at, pages)
        left[0] += before - len(at.there)

    drop = AddressRange.drop
    monkeypatch.setattr(AddressRange, "map_pages", mapped)
    monkeypatch.setattr(AddressRange, "drop", dropped)
    await resized(pair.a, GROUPS)
    assert there(pair.a) == 2 * GROUP, "of three more, which it can't have, one"
    fake_gpu.fail("")


@pytest.mark.long
def test_one_whose_cache_cannot_be_shared_has_all_of_its_memory(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        device_sharing, "unshared", lambda _, *made: "of another kind" if made else ""
    )
    side = Side(Configuration(flags=FLAGS, shared=True))
    assert side.engine.sharing == "of another kind"
    assert there(side) == GROUPS * GROUP
    ended(side)
