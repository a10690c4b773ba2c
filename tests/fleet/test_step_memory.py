"""What vLLM takes on a CPU for its largest step, by a model's configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from kvmig.fleet.step_memory import StepLimits, step_memory
from tests.support.zoo import FAMILIES

MIB = 1 << 20
LIMITS = StepLimits(tokens=2048, requests=128, length=1216)
SMALL = replace(LIMITS, tokens=128)
MEASURED = {
    "llama3": (replace(LIMITS, sampled=23), 192), "llama7b": (replace(LIMITS, fitting=1.3), 61),
    "qwen2.5": (LIMITS, 87),
    "qwen3": (LIMITS, 110), "qwen3-moe": (LIMITS, 93), "mixtral": (LIMITS, 63),
    "mistral": (LIMITS, 70), "gemma3": (LIMITS, 83), "gpt-oss": (LIMITS, 19),
    "deepseek-v2": (LIMITS, 144), "qwen3-next": (LIMITS, 599),
    "granite4": (replace(SMALL, fitting=15), 69), "nemotron-h": (replace(SMALL, fitting=8), 86),
    "mamba2": (replace(LIMITS, fitting=11), 500), "llama4": (LIMITS, 140),
    "paddleocr-vl": (LIMITS, 64),
}  # fmt: skip
"""MiB by which a process of plain vLLM 0.32 grew on 27 November 2026, from its weights and KV cache
to its largest step."""
FIRST_STEP = 60
"""MiB of them that any first step takes: libraries' own."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_takes_what_was_measured_of_each_family(family: str) -> None:
    limits, grown = MEASURED[family]
    assert abs(step_memory(FAMILIES[family], limits) / MIB + FIRST_STEP - grown) < 90
    assert set(MEASURED) == set(FAMILIES)


def test_recurrent_layers_grow_with_the_tokens_of_a_step() -> None:
    for family in ("mamba2", "qwen3-next", "granite4", "nemotron-h"):
        one, four = (
            step_memory(FAMILIES[family], replace(LIMITS, tokens=tokens, fitting=1))
            for tokens in (256, 1024)
        )
        assert 3 * one < four, family


def test_the_sampler_counts_where_it_takes_more_than_the_layers() -> None:
    few = step_memory(FAMILIES["llama3"], replace(LIMITS, requests=1))
    many = step_memory(FAMILIES["llama3"], replace(LIMITS, requests=256))
    assert many - few > 200 * MIB


def test_a_kv_cache_with_room_for_one_request_bounds_the_step() -> None:
    config = FAMILIES["llama7b"]
    assert step_memory(config, replace(LIMITS, fitting=1)) == step_memory(
        config, replace(LIMITS, tokens=1216)
    )


def test_workers_divide_layers_and_not_the_logits() -> None:
    config = FAMILIES["qwen3-next"]
    whole, half = (step_memory(config, LIMITS, workers) for workers in (1, 2))
    assert 0.5 < half / whole < 0.6


def test_a_text_model_within_another_counts_as_itself() -> None:
    config = FAMILIES["mistral"]
    assert step_memory({"text_config": config, "hidden_size": 1}, LIMITS) == step_memory(
        config, LIMITS
    )


@hypothesis.given(
    config=st.dictionaries(
        st.sampled_from(sorted({name for one in FAMILIES.values() for name in one})),
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
        ),
    ),
    tokens=st.integers(1, 1 << 20),
    fitting=st.floats(0, 1000),
)
def test_any_configuration_has_a_size(config: dict[str, Any], tokens: int, fitting: float) -> None:
    limits = replace(LIMITS, tokens=tokens, fitting=fitting)
    assert step_memory(config, limits) >= 0


def test_the_sampler_has_no_more_requests_than_the_kv_cache_has_blocks_for() -> None:
    config = FAMILIES["llama3"]
    few, many = (replace(LIMITS, requests=requests, sampled=24.0) for requests in (32, 128))
    assert step_memory(config, few) == step_memory(config, many)
    assert step_memory(config, many) < step_memory(config, replace(many, sampled=128.0))
    assert step_memory(config, LIMITS) == step_memory(config, replace(LIMITS, sampled=500.0))
