"""Answers with many log-probabilities are made beside the event loop, and are the same answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from kvmig.frontend.openai import body_threads
from kvmig.frontend.openai.vllm import answers
from tests.vllm_application import MODEL, application, client_of

pytestmark = pytest.mark.engine
TOKENS, LIKELIEST = 40, 5
WIDTH = LIKELIEST + 1


def put(request_id: str, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    """Tokens with log-probabilities, and those of the prompt."""
    params = request.sampling_params
    assert params is not None
    prompt = None
    if params.prompt_logprobs is not None:
        rows = len(request.prompt_token_ids or ()) - 1
        likeliest = torch.arange(rows * WIDTH).reshape(rows, WIDTH) % 200
        prompt = LogprobsTensors(likeliest, -likeliest / 7, torch.ones(rows, dtype=torch.int32))
    outputs = []
    for number in range(TOKENS):
        ids = np.arange(number, number + WIDTH, dtype=np.int32)[None, :]
        logprobs = None
        if params.num_logprobs is not None:
            logprobs = LogprobsLists(ids, -ids.astype(np.float32) / 3, np.ones(1, np.int32))
        outputs.append(
            EngineCoreOutput(
                request_id, [number], logprobs, None if number else prompt,
                finish_reason=FinishReason.LENGTH if number == TOKENS - 1 else None,
            )
        )  # fmt: skip
    return outputs


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": [7] * 30, "logprobs": LIKELIEST}),
    "prompts": ("/v1/completions", {"prompt": ["a", "b"], "logprobs": LIKELIEST}),
    "prompt_logprobs": (
        "/v1/completions", {"prompt": [7] * 30, "prompt_logprobs": LIKELIEST},
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": 'a "b"'}], "logprobs": True,
            "top_logprobs": LIKELIEST, "prompt_logprobs": LIKELIEST, "n": 2, "seed": 1,
        },
    ),
}  # fmt: skip


def without_chance(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("id", "created")}


@pytest.mark.parametrize("name", CALLS)
async def test_a_large_answer_is_made_on_another_thread_and_says_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields = CALLS[name]
    body = {"model": MODEL, "max_tokens": TOKENS, **fields}
    threads: list[str] = []
    spell: Callable[[Any], Any] = answers._spell

    def noted(answer: Any) -> Any:
        threads.append(threading.current_thread().name)
        return spell(answer)

    monkeypatch.setattr(answers, "_spell", noted)
    async with application(put=put) as (app, _), client_of(app) as client:
        monkeypatch.setattr(answers, "MANY", 10**9)
        at_once = await client.post(path, json=body)
        assert threads == []
        monkeypatch.setattr(answers, "MANY", 16)
        monkeypatch.setattr(answers, "PIECE", 7)
        beside = await client.post(path, json=body)
    assert at_once.status_code == 200, at_once.text
    (thread,) = threads
    assert thread.startswith("answers")
    assert without_chance(beside.json()) == without_chance(at_once.json())
    assert beside.headers["content-type"] == at_once.headers["content-type"]
    assert int(beside.headers["content-length"]) == len(beside.content)


async def test_an_input_of_many_items_is_checked_on_another_thread() -> None:
    threads: set[str] = set()
    item = {"role": "user", "content": "a"}
    body: dict[str, Any] = {"model": MODEL, "input": [item] * 300, "max_output_tokens": TOKENS}
    wrong = {**body, "input": [item] * 300 + [{"type": "x"}]}
    async with application(put=put) as (app, _), client_of(app) as client:
        finish = body_threads.finish

        def noted(work: Any) -> Any:
            threads.add(threading.current_thread().name)
            return finish(work)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(body_threads, "finish", noted)
            answer = await client.post("/v1/responses", json=body)
            refused = await client.post("/v1/responses", json=wrong)
    assert answer.status_code == 200, answer.text
    assert refused.status_code == 400, refused.text
    assert threads
    assert all(one.startswith("bodies") for one in threads)
