"""A seeded request's generator is where its tokens left it, without drawing them all again."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from kvmig.engines.vllm.building import draw_times, generator_after
from kvmig.engines.vllm.core import StepCore

pytestmark = pytest.mark.engine

ENTRIES = 1000
Draw = Callable[[torch.Generator], object]

DRAWS: dict[str, Draw] = {
    "one number": lambda one: torch.randint(0, 2**31, (1,), generator=one),
    "two numbers": lambda one: torch.randint(0, 2**62, (1,), generator=one),
    "one an entry": lambda one: torch.empty(ENTRIES, dtype=torch.int32).random_(generator=one),
    "two an entry": lambda one: torch.empty(ENTRIES).exponential_(generator=one),
    "another number": lambda one: torch.empty(3, dtype=torch.int32).random_(generator=one),
}


@pytest.mark.parametrize("times", [1, 2, 7, 1500])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_it_stands_where_so_many_draws_leave_it(draw: Draw, times: int) -> None:
    skipping, drawing = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    draw_times(skipping, draw, times, ENTRIES)
    for _ in range(times):
        draw(drawing)
    assert torch.equal(skipping.get_state(), drawing.get_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("times", [1, 2, 7, 1500])
def test_on_a_gpu_too(times: int) -> None:
    def draw(one: torch.Generator) -> None:
        torch.empty(ENTRIES, device="cuda").exponential_(generator=one)

    skipping, drawing = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    draw_times(skipping, draw, times, ENTRIES)
    for _ in range(times):
        draw(drawing)
    assert torch.equal(skipping.get_state(), drawing.get_state())


def core(vocabulary: int) -> StepCore:
    """What is read of one whose model has so many tokens."""
    model = SimpleNamespace(
        logprobs_mode="raw_logprobs",
        use_fp64_gumbel=False,
        get_vocab_size=lambda: vocabulary,
    )
    config: Any = SimpleNamespace(
        model_config=model, device_config=SimpleNamespace(device_type="cpu")
    )
    return cast("StepCore", SimpleNamespace(vllm_config=config))


@pytest.fixture
def on_v1(monkeypatch: pytest.MonkeyPatch) -> None:
    current_platform.import_kernels()
    monkeypatch.setattr("kvmig.engines.vllm.runner.uses_v2", lambda core: False)


@pytest.mark.usefixtures("on_v1")
def test_vllms_own_sampler_left_it_there() -> None:
    state = generator_after(core(512), SamplingParams(temperature=1.0, seed=3), 9)
    sampler, drawing = TopKTopPSampler(), torch.Generator().manual_seed(3)
    for _ in range(9):
        sampler.forward(torch.zeros(1, 512), {0: drawing}, None, None)
    assert state == drawing.get_state().numpy().tobytes()


@pytest.mark.usefixtures("on_v1")
def test_two_thousand_tokens_of_a_large_vocabulary_take_under_a_tenth_of_a_second() -> None:
    large, params = core(128_000), SamplingParams(temperature=1.0, seed=3)

    def once() -> float:
        began = thread_time()
        generator_after(large, params, 2000)
        return thread_time() - began

    assert min(once() for _ in range(3)) < 0.1


@pytest.mark.usefixtures("on_v1")
@pytest.mark.parametrize(
    "params", [None, SamplingParams(temperature=1.0), SamplingParams(temperature=0.0, seed=1)]
)
def test_only_what_is_seeded_and_sampled_has_one(params: SamplingParams | None) -> None:
    assert generator_after(core(512), params, 5) is None
