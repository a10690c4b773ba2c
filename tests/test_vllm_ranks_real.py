"""Real vLLM engines whose workers are processes of their own: on a CPU, and with their KV caches on
GPUs of the tests' own, where this process copies them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvmig.engines.vllm import worker
from kvmig.engines.vllm.serving import ServingVllm
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports.select import Site, open_offer, open_staging
from tests import fake_gpu, gpu_worker
from tests.vllm_pair import LONG, PROMPT, SEEDED, Engines, Pair, assert_same
from tests.vllm_side import Configuration, Side

pytestmark = pytest.mark.engine


TWO = ("--tensor-parallel-size=2",)
ONE_ON_A_CPU: tuple[tuple[str, ...], bool] = (), False
ONE_ON_A_GPU: tuple[tuple[str, ...], bool] = (), True
TWO_ON_GPUS = TWO, True


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ONE_ON_A_GPU, id="one on a GPU"),
        pytest.param(ONE_ON_A_CPU, id="one on a CPU", marks=pytest.mark.long),
        pytest.param(TWO_ON_GPUS, id="two on GPUs", marks=pytest.mark.long),
    ],
)
def both(
    request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Side, Side]]:
    """An engine on a CPU, and one with as many workers that are processes."""
    flags, on_gpus = request.param
    engines.side(Configuration())  # first: a worker inherits what vLLM does once a process
    with ExitStack() as held:
        held.callback(engines.close)  # the first that ends takes vLLM's process groups along
        beside = engines.side(Configuration(flags=flags))
        if on_gpus:
            held.enter_context(fake_gpu.installed())
            held.enter_context(caches_on_gpus(tmp_path_factory.mktemp("gpu")))
        apart = Side(Configuration(flags=flags, apart=True, async_scheduling=on_gpus))
        held.callback(apart.close)
        assert apart.engine.layout.gpu == (0 if on_gpus else None)
        yield beside, apart


@contextmanager
def caches_on_gpus(folder: Path, first: int = 0) -> Iterator[None]:
    """Engines that start inside have their caches on GPUs of the tests' own, from `first` on."""
    with pytest.MonkeyPatch.context() as patch:
        library = shutil.copy(fake_gpu.path(), folder)
        export = partial(gpu_worker.export_cache, library=str(library), first=first)
        patch.setattr(worker, "export_cache", export)
        open_memory = ServingVllm._open

        def on_a_gpu(engine: ServingVllm, *arguments: Any) -> None:
            engine._core.vllm_config.device_config.device_type = "cuda"
            open_memory(engine, *arguments)

        patch.setattr(ServingVllm, "_open", on_a_gpu)
        yield


@pytest.fixture
async def pair(both: tuple[Side, Side]) -> AsyncIterator[Pair]:
    """The engines, which a test leaves empty."""
    pair = Pair(*both)
    pair.begin()
    yield pair
    await pair.assert_empty()


async def test_a_request_moved_there_and_back_equals_one_left_alone(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT, **SEEDED)
    assert_same(await pair.there_and_back(PROMPT, **SEEDED), unmoved)


async def test_a_request_moves_in_the_middle_of_its_prefill(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    assert_same(await pair.moved_in_prefill(LONG), unmoved)


class Across(Pair):
    """Engines of a GPU each: what is copied while a request decodes goes by CUDA IPC."""

    crossed = 0

    async def copy(self, source: Side, to: Side, ids: Sequence[int], into: Sequence[int]) -> None:
        if not ids:
            return
        nbytes = len(ids) * source.engine.layout.block_bytes
        here, there = (Site(gpu=side.engine.layout.gpu) for side in (source, to))
        staging = open_staging("cuda-ipc", "test", "a", 1, nbytes, here)["cuda-ipc"]
        inbox = await asyncio.to_thread(open_offer, [staging.offer()], "cuda-ipc", there)
        slot, channel = await staging.acquire(1), staging.channel(inbox.token)
        sums = await self.done(source.engine.gather(ids, await channel.buffer(slot)))
        chunk = Chunk("m", 0, 0, slot, nbytes, sums)
        await channel.push(chunk, lambda payload=(), number=0: None)
        came = await inbox.receive(chunk, None)
        assert await self.done(to.engine.scatter(into, came)) == sums
        self.crossed += len(ids)
        inbox.close()
        staging.close()


@pytest.fixture
async def across(engines: Engines, tmp_path: Path) -> AsyncIterator[Across]:
    engines.side(Configuration())
    with ExitStack() as held:
        held.callback(engines.close)
        held.enter_context(fake_gpu.installed())
        sides = []
        for gpu in (0, 1):
            with caches_on_gpus(tmp_path, gpu):
                sides.append(Side(Configuration(apart=True, async_scheduling=True)))
            held.callback(sides[-1].close)
        assert [side.engine.layout.gpu for side in sides] == [0, 1]
        pair = Across(*sides)
        pair.begin()
        yield pair
        await pair.assert_empty()


@pytest.mark.long
async def test_a_request_moves_between_engines_on_two_gpus_by_cuda_ipc(across: Across) -> None:
    unmoved = await across.unmoved(LONG, **SEEDED)
    assert_same(await across.there_and_back(LONG, **SEEDED), unmoved)
    assert across.crossed >= len(LONG) // 32  # on the way back the prefix is there
