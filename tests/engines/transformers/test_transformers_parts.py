"""The transformers adapter's parts: version, configuration, sampling, requests' states."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from kvmig.core.errors import ConfigError, StartupError, UnsupportedLayout
from kvmig.engines.transformers import factory, versions
from kvmig.engines.transformers.config import EngineConfig, parse
from kvmig.engines.transformers.loop import StepLoop
from kvmig.engines.transformers.model import refuse_windows
from kvmig.engines.transformers.payload import SubmittedRequest, decode
from kvmig.engines.transformers.requests import all_tokens, make_state
from kvmig.engines.transformers.sampling import (
    Limits,
    LogprobRecorder,
    SeededNoise,
    TruncationProcessor,
    gumbel,
    key,
    truncated,
)

pytestmark = pytest.mark.engine

SUBMITTED = SubmittedRequest(prompt_token_ids=[1, 2, 3], max_tokens=5, stop_token_ids=[9])


def test_another_version_is_refused_with_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "5.20.1")
    with pytest.raises(StartupError, match=r"5\.20\.1 is not supported.*5\.19\.x"):
        factory()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_blocks": 0}, "num_blocks is 0, must be 1 or more"),
        ({"block_tokens": 3}, "block_tokens is 3, must be 4 or more"),
        ({"dtype": "int3"}, "dtype is 'int3', must be float32 or bfloat16 or float16"),
        ({"device": "tpu"}, "device is 'tpu', must be cpu or cuda"),
        ({"device": 3}, "device is 3, must be cpu or cuda"),
        ({"blocks": 3}, "blocks"),
        ({"model": "/nowhere/at/all"}, "model is '/nowhere/at/all'"),
    ],
)
def test_fields_that_can_not_be_used_are_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        factory(**fields)


def test_the_loop_is_at_rest_until_it_finds_something_to_do_and_when_it_finds_nothing() -> None:
    """Copies ask it on their own thread whether they may take many SMs."""
    there, rests, over = [True, False], list[bool](), threading.Event()
    loop: StepLoop

    def prepare() -> bool:
        rests.append(loop.at_rest)
        return there.pop(0)

    processor = SimpleNamespace(
        inputs_and_outputs=SimpleNamespace(compute_stream=None, requests_in_batch=[]),
        prepare_next_batch=prepare,
        _generation_step=lambda model: rests.append(loop.at_rest),
        update_batch=lambda: None,
    )
    loop = StepLoop(SimpleNamespace(batch_processor=processor, model=None), lambda _: None)
    loop.start(lambda error: over.set())
    loop.call(lambda: None).result(10)
    assert loop.stop(10)
    assert over.wait(10)
    assert [*rests, loop.at_rest] == [True, False, False, True]


def test_sliding_windows_are_refused_by_name() -> None:
    class Windows:
        model_type = "windowed"
        layer_types = ("full_attention", "sliding_attention")
        num_hidden_layers = 2

    with pytest.raises(UnsupportedLayout, match="full_attention and sliding_attention"):
        refuse_windows(Windows())


@pytest.mark.parametrize("field", ["presence_penalty", "logit_bias", "best_of"])
def test_a_request_with_a_field_that_the_engine_cannot_follow_is_refused_by_name(
    field: str,
) -> None:
    frame = msgspec.msgpack.encode({"prompt_token_ids": [1], "max_tokens": 2, field: 1})
    with pytest.raises(msgspec.ValidationError, match=f"unknown field `{field}`"):
        decode(frame, SubmittedRequest)


def test_configuration_has_defaults_for_everything() -> None:
    assert parse({}) == EngineConfig()


@pytest.mark.parametrize(("seed", "alike"), [(1, True), (2, False)])
async def test_engines_exchange_blocks_if_their_random_weights_are_the_same(
    seed: int, alike: bool
) -> None:
    small: dict[str, Any] = {"random_weights": True, "num_blocks": 4, "max_batch_tokens": 8}
    one, other = factory(weights_seed=1, **small), factory(weights_seed=seed, **small)
    assert one.layout.matches(other.layout) is alike
    for engine in (one, other):
        await engine.close(1)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    keys = torch.tensor([[key(1, 5)], [key(1, 6)], [key(2, 5)]])
    noise = gumbel(keys, 1000)
    assert torch.equal(gumbel(keys[1:2], 1000), noise[1:2])
    assert len({float(value) for value in noise.flatten()}) == 3000


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel(torch.tensor([[key(seed, 0)] for seed in range(20)]), 10_000)
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - 1.6449) < 0.05


def test_greedy_requests_keep_their_scores_beside_others_that_sample() -> None:
    scores = torch.zeros(2, 8)
    changed = SeededNoise()(scores, torch.tensor([0, key(3, 4)], dtype=torch.int32))
    assert torch.equal(changed[0], scores[0])
    assert not torch.equal(changed[1], scores[1])


SHARES = torch.tensor([[0.2, 0.5, 0.0, 0.3]]).log()


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ((0, 1.0, 0.0), [0, 1, 3]),
        ((2, 1.0, 0.0), [1, 3]),
        ((9, 1.0, 0.0), [0, 1, 3]),
        ((0, 0.6, 0.0), [1, 3]),
        ((0, 0.4, 0.0), [1]),
        ((0, 1.0, 0.5), [1, 3]),
        ((2, 0.7, 0.0), [1, 3]),  # of what top_k leaves, the first has 0.625
        ((1, 1.0, 1.0), [1]),
    ],
)
def test_only_tokens_within_the_limits_can_be_had(limits: Limits, left: list[int]) -> None:
    kept = truncated(SHARES.repeat(2, 1), [limits, (0, 1.0, 0.0)])
    assert [at for at in range(4) if kept[0, at] > -torch.inf] == left
    assert torch.equal(kept[0, left], SHARES[0, left])
    assert torch.equal(kept[1], SHARES[0])


class Row:
    """A request of a step, as transformers hands it to processors."""

    def __init__(self, request_id: str, **wanted: Any) -> None:
        self.state = make_state(request_id, structs.replace(SUBMITTED, **wanted), [])


def test_log_probabilities_are_of_the_scores_before_all_else() -> None:
    logprobs, scores = LogprobRecorder(), SHARES.repeat(3, 1) + 7
    logprobs.prepare_tensor_args([Row("a"), Row("b", logprobs=2), Row("c", logprobs=0)])
    assert logprobs(scores, torch.empty(0)) is scores
    found = logprobs.logprob_of("b", 2, 2)
    assert found.value == -9999.0
    assert found.top_ids == [1, 3]
    assert found.top == pytest.approx([math.log(0.5), math.log(0.3)])
    assert logprobs.logprob_of("c", 0, 0).value == pytest.approx(math.log(0.2))
    assert logprobs.logprob_of("c", 0, 0).top == []
    with pytest.raises(KeyError):
        logprobs.logprob_of("a", 0, 0)


def test_requests_without_limits_keep_their_scores_beside_others_that_have_some() -> None:
    truncation, scores = TruncationProcessor(), SHARES.repeat(3, 1)
    rows = [Row("a", temperature=1.0), Row("b", temperature=1.0, top_k=1), Row("c", top_k=1)]
    truncation.prepare_tensor_args(rows)
    changed = truncation(scores, torch.empty(0))
    assert torch.equal(changed[[0, 2]], scores[[0, 2]])
    assert torch.isfinite(changed[1]).tolist() == [False, True, False, False]
    truncation.prepare_tensor_args([Row("a")])
    assert truncation(scores, torch.empty(0)) is scores


@pytest.mark.parametrize(
    ("outputs", "computed", "status", "left"),
    [
        ([], 0, "PENDING", [1, 2, 3]),
        ([], 2, "PREFILLING", [3]),
        ([7, 8], 0, "PENDING", [1, 2, 3, 7, 8]),
        ([7, 8], 3, "PREFILLING", [7, 8]),
        ([7, 8], 4, "DECODING", []),
    ],
)
def test_a_state_is_as_the_scheduler_would_have_it(
    outputs: list[int], computed: int, status: str, left: list[int]
) -> None:
    state = make_state("r", SUBMITTED, outputs, computed)
    assert state.status.name == status
    assert state.remaining_prefill_tokens == left
    assert all_tokens(state) == [1, 2, 3, *outputs]
    assert state.current_len() == computed
    assert state.max_new_tokens - len(state.generated_tokens) == 5 - len(outputs)
