"""A model with Qwen3-0.6B's KV cache and vocabulary as users have it: `python -m bench.real`,
shortened, and in 32 bits. What lies between the layers' caches is thin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import real
from bench.models import QWEN3, make_checkpoint
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, row_of, run_moved, run_unmoved

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
FLAGS = (
    *real.FLAGS, "--kv-cache-memory-bytes=512m", "--max-model-len=2048", "--dtype=float32",
)  # fmt: skip
"""A CPU takes three seconds to make a GiB."""
BLOCK = 128
"""Tokens: vLLM's own on a CPU."""
TOKEN_BYTES = 2 * 4 * QWEN3["num_hidden_layers"] * QWEN3["num_key_value_heads"] * QWEN3["head_dim"]
"""Keys and values in float32."""
PROMPT = [number * number % 5000 for number in range(2 * BLOCK + 20)]


@pytest.fixture(scope="module")
def served(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("real")
    model = folder / "thin"
    make_checkpoint(model, {**QWEN3, "hidden_size": 256, "intermediate_size": 256})
    with leaving_nothing(Served(FLAGS, model=model, nursery=nursery, log=folder / "log")) as served:
        yield served
        assert_server_is_empty(served)


def body(prompt: list[int], tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **fields}


async def test_a_stream_of_a_real_models_shape_moves_there_and_back(served: Served) -> None:
    # A prefix that is found in the cache would leave another prefill, which rounds otherwise.
    unmoved = await run_unmoved(served, PATH, body(PROMPT, 120, logprobs=1, cache_salt="stays"))

    wanted = body(PROMPT, 120, logprobs=1, cache_salt="moves")
    moved, reports = await run_moved(served, PATH, wanted, at=(5, 14))

    assert [report["state"] for report in reports] == ["committed"] * 2, reports
    assert reports[0]["bytes"] == (3 - reports[0]["hit_blocks"]) * BLOCK * TOKEN_BYTES
    moved.same_as(unmoved)


async def test_calls_at_once_are_spread_over_both_instances(served: Served) -> None:
    """With the round robin of the bench's flags: as many here as there."""
    streams = [Stream(served, PATH, body([7, number], 20)) for number in range(8)]
    rows = await asyncio.gather(*(row_of(served, stream) for stream in streams))
    places = [row["instance"] for row in rows]
    answers = await asyncio.gather(*(stream.end() for stream in streams))

    assert [places.count(name) for name in ("i0", "i1")] == [4, 4]
    assert [answer.tokens for answer in answers] == [20] * 8
