"""Requests move between engines with vLLM's native offload (`--kv-offloading-size`).

Its scheduler's side is vLLM's own; its copies, which vLLM makes on GPUs only, are plain ones here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
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

from kvmig.engines.vllm.offload import BeingOffloaded
from tests.vllm_pair import SAMPLING, Output, Pair

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


class Offloading(Pair):
    """Two engines and the workers that copy for them."""

    def __init__(self, async_scheduling: bool) -> None:
        self.workers: list[HostWorker] = []

        def get_worker(spec: CPUOffloadingSpec, caches: CanonicalKVCaches) -> HostWorker:
            self.workers.append(HostWorker(caches, spec.num_chunks))
            return self.workers[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CPUOffloadingSpec, "get_worker", get_worker)
            flags = ["--kv-offloading-size=0.02"]
            super().__init__(async_scheduling, flags, flags)

    def forget(self) -> None:
        """Nothing was offloaded so far: what is loaded isn't computed in the same pieces."""
        for side in (self.a, self.b):
            connector = side.engine._scheduler.connector
            assert connector is not None
            connector.reset_cache()

    async def unmoved(self, prompt: Sequence[int], **params: Any) -> Output:
        output = await super().unmoved(prompt, **params)
        self.forget()
        return output


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engines(request: pytest.FixtureRequest) -> Iterator[Offloading]:
    pair = Offloading(request.param)
    yield pair
    pair.close()


@pytest.fixture
async def pair(engines: Offloading) -> Offloading:
    """With nothing offloaded so far."""
    engines.begin()
    engines.forget()
    for worker in engines.workers:
        worker.loads, worker.stores = 0, 0
    return engines


@pytest.mark.parametrize("params", SAMPLING[:4], ids=str)
async def test_a_request_moved_there_and_back_equals_the_one_left_alone(
    pair: Offloading, params: dict[str, Any]
) -> None:
    unmoved = await pair.unmoved(PROMPT, **params)

    pair.submit(pair.a, "r", PROMPT, **params)
    await pair.step(pair.a, until=("r", 10))
    await pair.move(pair.a, pair.b, "r")
    await pair.step(pair.b, until=("r", 30))
    pair.a.step()  # what the request has left is copied with the next step
    pair.a.step()
    await pair.move(pair.b, pair.a, "r")
    moved = await pair.finish("r")

    assert (moved.tokens, moved.logprobs) == (unmoved.tokens, unmoved.logprobs)
    assert moved.finish_reason == unmoved.finish_reason
    await pair.assert_empty()


async def test_what_a_moved_request_leaves_on_the_host_serves_others_there(
    pair: Offloading,
) -> None:
    """Its blocks have other numbers here, and this engine's steps never handed them out."""
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "r", PROMPT)
    await pair.step(pair.a, until=("r", 5))
    await pair.move(pair.a, pair.b, "r")
    await pair.finish("r")
    await pair.idle()
    assert pair.workers[1].stores >= BLOCKS

    pair.b.engine._scheduler.reset_prefix_cache()
    pair.submit(pair.b, "later", PROMPT)
    later = await pair.finish("later")

    assert pair.workers[1].loads >= BLOCKS
    assert later.tokens == unmoved.tokens
    assert later.logprobs == [pytest.approx(one, abs=1e-3) for one in unmoved.logprobs]
    await pair.assert_empty()


async def test_a_request_that_waited_elsewhere_finds_its_prefix_on_the_host(
    pair: Offloading,
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.b, "before", PROMPT)
    await pair.finish("before")
    await pair.idle()
    pair.b.engine._scheduler.reset_prefix_cache()
    before = pair.workers[1].loads

    pair.submit(pair.a, "r", PROMPT)
    await pair.move(pair.a, pair.b, "r", steps=0)
    moved = await pair.finish("r")

    assert pair.workers[1].loads > before
    assert moved.tokens == unmoved.tokens
    await pair.assert_empty()


async def test_a_request_that_ran_elsewhere_is_recomputed_and_goes_on(pair: Offloading) -> None:
    unmoved = await pair.unmoved(PROMPT, logprobs=None)

    pair.submit(pair.b, "r", PROMPT, again=unmoved.tokens[:20], logprobs=None)
    await pair.b.entered()
    again = await pair.finish("r")

    assert again.tokens == unmoved.tokens[20:]
    await pair.assert_empty()


async def test_nothing_arrives_in_a_block_that_is_being_offloaded(pair: Offloading) -> None:
    """What a request that has left held is free, and is copied to the host with the next step."""
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "r", PROMPT)
    await pair.step(pair.a, until=("r", 10))
    await pair.move(pair.a, pair.b, "r")
    free = pair.a.engine._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    export = await pair.done(pair.b.engine.export("r"))
    with pytest.raises(BeingOffloaded) as refused:
        await pair.done(pair.a.engine.reserve(export))
    assert refused.value.reason == "no_blocks"
    assert pair.a.engine._scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    await pair.done(pair.b.engine.resume("r"))

    coming = asyncio.ensure_future(pair.move(pair.b, pair.a, "r"))
    await asyncio.sleep(0.02)
    assert not coming.done()
    pair.a.step()
    pair.a.step()
    await coming
    moved = await pair.finish("r")
    assert (moved.tokens, moved.logprobs) == (unmoved.tokens, unmoved.logprobs)
    await pair.assert_empty()
