"""Real vLLM engines whose workers are processes of their own: on a CPU, and with their KV caches on
GPUs of the tests' own, where this process copies them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvmig.engines.vllm import worker
from kvmig.engines.vllm.serving import ServingVllm
from tests.support import fake_gpu, gpu_worker
from tests.support.copy_device import device_copies_of
from tests.support.vllm_pair import LONG, PROMPT, SEEDED, Engines, Pair, assert_same
from tests.support.vllm_side import Configuration, Side

pytestmark = [pytest.mark.engine, pytest.mark.long]


TWO = ("--tensor-parallel-size=2",)
ONE_ON_A_CPU: tuple[tuple[str, ...], bool] = (), False
ONE_ON_A_GPU: tuple[tuple[str, ...], bool] = (), True
TWO_ON_GPUS = TWO, True


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(ONE_ON_A_GPU, id="one on a GPU"),
        pytest.param(ONE_ON_A_CPU, id="one on a CPU"),
        pytest.param(TWO_ON_GPUS, id="two on GPUs"),
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
            patch = held.enter_context(pytest.MonkeyPatch.context())
            library = shutil.copy(fake_gpu.path(), tmp_path_factory.mktemp("gpu"))
            export = partial(gpu_worker.export_cache, library=str(library))
            patch.setattr(worker, "export_cache", export)
            open_memory = ServingVllm._open

            def on_a_gpu(engine: ServingVllm, *arguments: Any) -> None:
                engine._core.vllm_config.device_config.device_type = "cuda"
                open_memory(engine, *arguments)

            patch.setattr(ServingVllm, "_open", on_a_gpu)
        apart = Side(Configuration(flags=flags, apart=True, async_scheduling=on_gpus))
        held.callback(apart.close)
        assert apart.engine.layout.gpu == (0 if on_gpus else None)
        yield beside, apart


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


async def test_copies_are_wide_until_the_engine_has_a_request_and_after_it(pair: Pair) -> None:
    copies = device_copies_of(pair.b)
    if copies is None:
        pytest.skip("an engine on a CPU")
    await pair.idle()
    assert copies.width.engine_idle()
    await pair.run(pair.b, "alone", PROMPT, until=3)
    assert not copies.width.engine_idle()
    await pair.done(pair.b.engine.export("alone"))
    await pair.suspend(pair.b, "alone", 0)
    await pair.idle()
    assert copies.width.engine_idle(), "its only request is suspended"
    await pair.done(pair.b.engine.resume("alone"))
    assert not copies.width.engine_idle()
    await pair.finish("alone")
