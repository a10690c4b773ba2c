"""A response moved twice mid-decode equals the one left alone, in everything a client sees."""

from __future__ import annotations

from typing import Any

import pytest

from bench.served import Served
from tests.streams import run_moved, run_unmoved

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "Count: 0017 0018"


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": PROMPT, "max_tokens": 600, "ignore_eos": True, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "Count from 0042"}]
    return CHAT, {"messages": messages, "max_tokens": 600, "ignore_eos": True, **fields}


CALLS = {
    "greedy": completion(temperature=0),
    "seeded with top-p": completion(temperature=1.2, top_p=0.9, seed=7),
    "seeded with top-k": completion(temperature=1.5, top_k=20, seed=8),
    "penalties": completion(
        temperature=0.9, seed=9, presence_penalty=0.6, frequency_penalty=0.4,
        repetition_penalty=1.1,
    ),
    "log-probabilities": completion(temperature=0.8, seed=3, logprobs=3),
    "prompt of many blocks": completion(
        temperature=0.7, seed=4, logprobs=1, prompt=" ".join(f"{n:04d}" for n in range(100, 400))
    ),
    "stop string": completion(temperature=0, stop=["0099"]),
    "stop token ids and min_tokens": completion(temperature=1.5, seed=5, min_tokens=300),
    "n = 2": completion(temperature=1.1, seed=11, n=2, logprobs=1),
    "guided regex": completion(
        temperature=1.0, seed=2, structured_outputs={"regex": "([0-9]{3}[a-f] ){150}"}
    ),
    "chat with usage and log-probabilities": chat(
        temperature=0.9, seed=6, logprobs=True, top_logprobs=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
async def test_a_call_moved_twice_equals_the_one_left_alone(served: Served, kind: str) -> None:
    path, body = CALLS[kind]
    unmoved = await run_unmoved(served, path, body)

    moved, reports = await run_moved(served, path, body)

    assert [report["state"] for report in reports] == ["committed"] * len(reports), reports
    assert len(reports) == 2 * len(moved.choices)
    moved.same_as(unmoved)
