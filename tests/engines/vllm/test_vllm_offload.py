"""Requests move between engines with vLLM's native offload (`--kv-offloading-size`).

Its scheduler's side is vLLM's own; its copies, which vLLM makes on GPUs only, are plain ones here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvmig.controlplane.prefix_index import PrefixIndex
from kvmig.core.errors import RequestGone
from kvmig.core.prefix_marks import MARK_TOKENS, MarkChain
from kvmig.engines.vllm.offload import BeingOffloaded
from tests.support.vllm_connector import start_connected
from tests.support.vllm_pair import SAMPLING, SEEDED, Engines, Pair, assert_same, preempt
from tests.support.vllm_side import Configuration, Output, Side

pytestmark = pytest.mark.engine

PROMPT = [*range(1, 200)]
BLOCKS = len(PROMPT) // 32
"""Full ones, which are offloaded."""


class HostWorker(OffloadingWorker):
    """Copies blocks of one group when it is asked whether it has: late, as a busy GPU does."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self.loads = 0
        self.stores = 0
        self._device = [one.tensor for one in caches.tensors]
        self._host = [torch.zeros((chunks, one.shape[1]), dtype=one.dtype) for one in self._device]
        self._jobs: dict[int, tuple[bool, np.ndarray, np.ndarray]] = {}
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._jobs[job_id] = (True, src_spec.block_ids, dst_spec.block_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._jobs[job_id] = (False, dst_spec.block_ids, src_spec.block_ids)
        return True

    def get_finished(self) -> list[TransferResult]:
        self.wait(set(self._jobs))
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            stores, blocks, chunks = self._jobs.pop(job_id)
            for device, host in zip(self._device, self._host, strict=True):
                here, there = (host, device) if stores else (device, host)
                into, out = (chunks, blocks) if stores else (blocks, chunks)
                here[torch.from_numpy(into).long()] = there[torch.from_numpy(out).long()]
            self.stores += len(blocks) if stores else 0
            self.loads += 0 if stores else len(blocks)
            self._done.append(TransferResult(job_id, success=True))


WORKERS: dict[Side, HostWorker] = {}


def begin(engines: Engines, wanted: Configuration, number: int) -> None:
    """Start an engine whose worker is a HostWorker, unless it is there."""
    with pytest.MonkeyPatch.context() as patch:
        made: list[HostWorker] = []

        def get_worker(spec: CPUOffloadingSpec, caches: CanonicalKVCaches) -> HostWorker:
            made.append(HostWorker(caches, spec.num_chunks))
            return made[0]

        patch.setattr(CPUOffloadingSpec, "get_worker", get_worker)
        side = start_connected(engines, wanted, number)
    if side not in WORKERS:
        (WORKERS[side],) = made


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.long), True], ids=["sync", "async"])
async def pair(request: pytest.FixtureRequest, engines: Engines) -> AsyncIterator[Pair]:
    """With nothing offloaded so far."""
    wanted = Configuration(request.param, ("--kv-offloading-size=0.02",))
    for number in range(2):
        begin(engines, wanted, number)
    async with engines.lent(wanted, wanted) as pair:
        forget(pair)
        for side in (pair.a, pair.b):
            WORKERS[side].loads = WORKERS[side].stores = 0
        yield pair


def forget(pair: Pair) -> None:
    """Nothing was offloaded so far: what is loaded isn't computed in the same pieces."""
    for side in (pair.a, pair.b):
        connector = side.scheduler.connector
        assert connector is not None
        connector.reset_cache()


async def unmoved(pair: Pair, **params: Any) -> Output:
    """A request that is left alone, and that nothing remembers."""
    output = await pair.unmoved(PROMPT, **params)
    forget(pair)
    return output


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties", "truncated"])
async def test_a_request_moved_there_and_back_equals_the_one_left_alone(
    pair: Pair, kind: str
) -> None:
    alone = await unmoved(pair, **SAMPLING[kind])

    await pair.run(pair.a, "r", PROMPT, until=10, **SAMPLING[kind])
    await pair.move(pair.a, pair.b, "r")
    await pair.step(pair.b, until=("r", 30))
    pair.a.step()  # what the request has left is copied with the next step
    pair.a.step()
    await pair.move(pair.b, pair.a, "r")

    assert_same(await pair.finish("r"), alone)


@pytest.mark.parametrize("back", [False, True])
async def test_what_a_moved_request_leaves_on_the_host_serves_others_there(
    pair: Pair, back: bool
) -> None:
    """Its blocks have other numbers there, and that engine's steps never handed them out."""
    here, there = (pair.b, pair.a) if back else (pair.a, pair.b)
    alone = await unmoved(pair)
    await pair.run(here, "r", PROMPT, until=5)
    await pair.move(here, there, "r")
    await pair.finish("r")
    await pair.idle()
    assert WORKERS[there].stores >= BLOCKS

    there.scheduler.reset_prefix_cache()
    pair.submit(there, "later", PROMPT)
    later = await pair.finish("later")

    assert WORKERS[there].loads >= BLOCKS
    assert later.tokens == alone.tokens
    assert later.logprobs == [pytest.approx(one, abs=1e-3) for one in alone.logprobs]


@pytest.mark.parametrize("moved", [False, True])
async def test_what_a_request_leaves_on_the_host_serves_those_of_its_salt_alone(
    pair: Pair, moved: bool
) -> None:
    side = pair.b if moved else pair.a
    await pair.run(pair.a, "hers", PROMPT, until=5, salt="anna")
    if moved:
        await pair.move(pair.a, pair.b, "hers")
    await pair.finish("hers")
    await pair.idle()
    assert WORKERS[side].stores >= BLOCKS

    for number, (salt, loads) in enumerate((("bea", 0), (None, 0), ("anna", BLOCKS))):
        side.scheduler.reset_prefix_cache()
        WORKERS[side].loads = 0
        pair.submit(side, f"r{number}", PROMPT, salt=salt, max_tokens=1)
        await pair.finish(f"r{number}")
        await pair.idle()
        assert WORKERS[side].loads >= loads
        assert bool(WORKERS[side].loads) == bool(loads), salt


def held(side: Side, salt: str = "") -> int:
    """Tokens of the prompt that a front end would find there."""
    assert side.engine.held_marks is not None
    index = PrefixIndex()
    index.learn("i", side.engine.held_marks.whole())
    return index.find_tokens(MarkChain(salt, "").extend(PROMPT, len(PROMPT)), 0.0).get("i", 0)


@pytest.mark.parametrize("moved", [False, True])
async def test_what_is_on_the_host_is_reported_as_held_until_it_goes(
    pair: Pair, moved: bool
) -> None:
    side = pair.b if moved else pair.a
    await pair.run(pair.a, "r", PROMPT, until=5, salt="anna")
    if moved:
        await pair.move(pair.a, pair.b, "r")
    await pair.finish("r")
    await pair.idle()
    side.scheduler.reset_prefix_cache()
    assert (held(side, "anna"), held(side, "bea"), held(side)) == (MARK_TOKENS, 0, 0)

    pair.submit(side, "later", PROMPT, salt="anna", max_tokens=1)
    await pair.finish("later")
    await pair.idle()
    assert WORKERS[side].loads >= BLOCKS - 1
    connector = side.scheduler.connector
    assert connector is not None
    connector.reset_cache()
    assert held(side, "anna") == MARK_TOKENS, "the KV cache has it still"
    side.scheduler.reset_prefix_cache()
    assert held(side, "anna") == 0


async def test_what_makes_way_on_the_host_is_held_no_more(pair: Pair) -> None:
    side = pair.a
    pair.submit(side, "first", PROMPT, max_tokens=1)
    await pair.finish("first")
    await pair.idle()
    side.scheduler.reset_prefix_cache()
    assert held(side) == MARK_TOKENS
    for number in range(60):
        if not held(side):
            break
        pair.submit(side, f"r{number}", [number + 5] * 900, max_tokens=1)
        await pair.finish(f"r{number}")
        await pair.idle()
        side.scheduler.reset_prefix_cache()
    assert held(side) == 0
    WORKERS[side].loads = 0
    pair.submit(side, "again", PROMPT, max_tokens=1)
    await pair.finish("again")
    assert WORKERS[side].loads < MARK_TOKENS // 32


async def test_a_request_that_waited_elsewhere_finds_its_prefix_on_the_host(pair: Pair) -> None:
    alone = await unmoved(pair)
    pair.submit(pair.b, "before", PROMPT)
    await pair.finish("before")
    await pair.idle()
    pair.b.scheduler.reset_prefix_cache()

    pair.submit(pair.a, "r", PROMPT)
    await pair.move(pair.a, pair.b, "r", steps=0)
    moved = await pair.finish("r")

    assert WORKERS[pair.b].loads >= BLOCKS
    assert moved.tokens == alone.tokens


async def test_a_request_that_ran_elsewhere_is_recomputed_and_goes_on(pair: Pair) -> None:
    alone = await unmoved(pair, logprobs=None)

    pair.submit(pair.b, "r", PROMPT, again=alone.tokens[:20], logprobs=None)
    await pair.b.entered()

    assert (await pair.finish("r")).tokens == alone.tokens[20:]


async def on_the_host(pair: Pair, side: Side) -> None:
    """The prompt is there, and not in the KV cache."""
    pair.submit(side, "before", PROMPT)
    await pair.finish("before")
    await pair.idle()
    side.scheduler.reset_prefix_cache()


async def test_one_that_runs_again_takes_its_prompt_from_the_host(pair: Pair) -> None:
    alone = await unmoved(pair)
    await on_the_host(pair, pair.b)

    pair.submit(pair.b, "r", PROMPT, again=alone.tokens[:20])
    await pair.b.entered()

    assert (await pair.finish("r")).tokens == alone.tokens[20:]
    assert WORKERS[pair.b].loads >= BLOCKS


async def test_one_preempted_elsewhere_takes_its_prompt_from_the_host(pair: Pair) -> None:
    alone = await unmoved(pair, **SEEDED)
    await on_the_host(pair, pair.b)
    await pair.run(pair.a, "r", PROMPT, until=10, **SEEDED)
    preempt(pair.a, "r")

    await pair.move(pair.a, pair.b, "r", steps=0)

    assert (await pair.finish("r")).tokens == alone.tokens
    assert WORKERS[pair.b].loads >= BLOCKS


async def test_one_whose_blocks_come_back_from_the_host_is_not_moved(pair: Pair) -> None:
    alone = await unmoved(pair)
    await on_the_host(pair, pair.a)
    pair.submit(pair.a, "r", PROMPT)
    pair.a.take_calls()
    await pair.done(pair.a.engine.export("r"))
    pair.a.step()

    with pytest.raises(RequestGone, match="started: OffloadingConnector holds it: blocks"):
        await pair.done(pair.a.engine.stage("r", 0))

    (state,) = await pair.done(pair.a.engine.requests())
    assert state.unmovable == "OffloadingConnector holds it: blocks of its prompt are on their way"
    assert (await pair.finish("r")).tokens == alone.tokens


async def test_one_comes_back_once_what_it_left_is_offloaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = await unmoved(pair)
    with monkeypatch.context() as slow:
        slow.setattr(WORKERS[pair.a], "get_finished", list)
        await pair.run(pair.a, "r", PROMPT, until=1)
        await pair.move(pair.a, pair.b, "r", steps=0)
        pair.a.scheduler.reset_prefix_cache()  # so that other blocks would be its own
        await pair.run(pair.a, "beside", PROMPT[::-1], until=3, max_tokens=9)
        export = await pair.done(pair.b.engine.export("r"))
        with pytest.raises(BeingOffloaded):
            await pair.done(pair.a.engine.reserve(export))
        await pair.done(pair.b.engine.resume("r"))

    for _ in range(20):
        pair.a.step()
    await pair.move(pair.b, pair.a, "r")
    assert_same(await pair.finish("r"), alone)


async def test_nothing_arrives_in_a_block_that_is_being_offloaded(pair: Pair) -> None:
    """What a request that has left held is free, and is copied to the host with the next step."""
    alone = await unmoved(pair)
    await pair.run(pair.a, "r", PROMPT, until=10)
    await pair.move(pair.a, pair.b, "r")
    free = pair.a.used_blocks

    export = await pair.done(pair.b.engine.export("r"))
    with pytest.raises(BeingOffloaded) as refused:
        await pair.done(pair.a.engine.reserve(export))
    assert refused.value.reason == "no_blocks"
    assert pair.a.used_blocks == free
    await pair.done(pair.b.engine.resume("r"))

    coming = asyncio.ensure_future(pair.move(pair.b, pair.a, "r"))
    await asyncio.sleep(0.02)
    assert not coming.done()
    pair.a.step()
    pair.a.step()
    await coming
    assert_same(await pair.finish("r"), alone)
