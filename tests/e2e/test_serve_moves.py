"""A response moved twice mid-decode equals the one left alone, in everything a client sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmig_tools.served import Served
from tests.support.streams import run_moved, run_unmoved, run_whole, run_whole_moved

pytestmark = pytest.mark.server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "Count: 0017 0018"
TOKENS = 200
"""Moves are asked for at the 30th and the 80th; on a busy machine they take a while."""
SEVEN = ord("7")
"""The bundled model's tokens are bytes."""


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "Count from 0042"}]
    return CHAT, {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **fields}


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
    "stop string": completion(temperature=0, stop=["0054", "0064"]),
    "stop token ids and min_tokens": completion(
        temperature=0.8, seed=5, min_tokens=150, stop_token_ids=[SEVEN], ignore_eos=False
    ),
    "n = 2": completion(temperature=1.1, seed=11, n=2, logprobs=1),
    "guided regex": completion(
        temperature=1.0, seed=2, structured_outputs={"regex": "([0-9]{3}[a-f] ){100}"}
    ),
    "chat with usage and log-probabilities": chat(
        temperature=0.9, seed=6, logprobs=True, top_logprobs=2
    ),
}  # fmt: skip


SELDOM = ("greedy", "seeded with top-p", "seeded with top-k", "penalties", "log-probabilities")
"""What other kinds hold too, or tests/engines/vllm/test_vllm_adapter.py at the engine."""


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.long if one in SELDOM else ()) for one in CALLS]
)
async def test_a_call_moved_twice_equals_the_one_left_alone(served: Served, kind: str) -> None:
    path, body = CALLS[kind]
    unmoved = await run_unmoved(served, path, body)
    assert unmoved.choices[0].finish_reason == ("stop" if "stop" in kind else "length")

    moved, reports = await run_moved(served, path, body)

    assert [report["state"] for report in reports] == ["committed"] * len(reports), reports
    assert len(reports) == 2 * len(moved.choices)
    moved.same_as(unmoved)


@pytest.mark.parametrize("kind", ["n = 2", "chat with usage and log-probabilities"])
@pytest.mark.long
async def test_a_moved_call_answered_as_a_whole_equals_the_one_left_alone(
    served: Served, kind: str
) -> None:
    path, body = CALLS[kind]
    unmoved = await run_whole(served, path, body)

    moved, reports = await run_whole_moved(served, path, body)

    assert [report["state"] for report in reports] == ["committed"] * len(reports), reports
    assert len(reports) == 2 * len(moved["choices"])
    for own in ("id", "created"):
        moved.pop(own)
        unmoved.pop(own)
    assert moved == unmoved


async def test_the_report_says_what_was_moved_and_what_the_pause_was_made_of(
    served: Served,
) -> None:
    path, body = CALLS["prompt of many blocks"]

    _, (there, back) = await run_moved(served, path, {**body, "prompt": body["prompt"] + " 0400"})

    for report, source, destination in ((there, "i0", "i1"), (back, "i1", "i0")):
        assert {report["source"], report["destination"]} == {source, destination}
        assert report["transport"] == "shm"
        parts = report["downtime_ms"]
        assert all(parts[part] >= 0 for part in ("drain", "tail_copy", "commit", "first_token"))
        assert report["total_ms"] >= parts["drain"] + parts["tail_copy"] + parts["commit"]
        assert report["tail_blocks"] >= 1
    assert sum(stage["blocks"] for stage in there["stages"]) + there["hit_blocks"] >= 40
    assert back["hit_blocks"] >= 40, "what it left behind is found there again"
    newest = (await asyncio.to_thread(served.get, "migrations"))[:2]
    assert newest == [back, there]
