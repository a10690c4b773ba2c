"""Answers with many log-probabilities are made beside the event loop, and are the same answers."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from kvmig.core.background import cancel_tasks
from kvmig.engines.vllm import late_logprobs
from kvmig.engines.vllm.outputs import failure
from kvmig.frontend.openai import body_threads
from kvmig.frontend.openai.vllm import (
    answer_chunks,
    answers,
    late_answers,
    logprob_counts,
    spelling,
)
from tests.support.vllm_application import MODEL, application, client_of
from tests.support.waiting import until

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
    "batch": (
        "/v1/chat/completions/batch",
        {
            "messages": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]],
            "logprobs": True, "top_logprobs": LIKELIEST,
        },
    ),
    "response": (
        "/v1/responses",
        {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": LIKELIEST},
    ),
    "token ids": (
        "/inference/v1/generate",
        {
            "token_ids": [7] * 30,
            "sampling_params": {
                "logprobs": LIKELIEST, "prompt_logprobs": LIKELIEST, "max_tokens": TOKENS,
            },
        },
    ),
}  # fmt: skip
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": CALLS["completion"],
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}], "logprobs": True,
            "top_logprobs": LIKELIEST, "n": 2, "seed": 1,
        },
    ),
    "echo": (
        "/v1/completions", {"prompt": "a b c d e f", "echo": True, "logprobs": LIKELIEST},
    ),
    "response": CALLS["response"],
    "token ids": (
        "/inference/v1/generate",
        {"token_ids": [7], "sampling_params": {"logprobs": LIKELIEST, "max_tokens": TOKENS}},
    ),
}  # fmt: skip
CHANCE = re.compile(
    r'"(?:id|item_id|request_id|created|created_at|completed_at|sequence_number)": ?'
    r'(?:"[^"]*"|[0-9.]+|null)'
)


def without_chance(text: str) -> str:
    """Whatever ids and times the answer has."""
    return CHANCE.sub("", text)


def sorted_json(text: str) -> str:
    return without_chance(json.dumps(json.loads(text), sort_keys=True))


def make_beside(patch: pytest.MonkeyPatch, many: int) -> None:
    for module in (answers, answer_chunks, late_logprobs):
        patch.setattr(module, "MANY", many)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads on which answers, chunks and log-probabilities are made from now on."""
    names: list[str] = []

    def note(owner: Any, name: str) -> None:
        made = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            names.append(threading.current_thread().name)
            return made(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(OpenAIServingChat, "_create_chat_logprobs")
    note(OpenAIServingCompletion, "_create_completion_logprobs")
    note(ServingTokens, "_create_tokens_logprobs")
    note(OpenAIServingResponses, "_topk_logprobs")
    note(LogprobsProcessor, "_update_prompt_logprobs")
    return names


async def test_large_answers_are_made_on_other_threads_and_say_the_same(
    threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with application("--enable-scale-out", put=put) as (app, _), client_of(app) as client:
        for name, (path, fields) in CALLS.items():
            at_once, beside = await both_ways(client, path, fields, threads, monkeypatch)
            assert sorted_json(beside.text) == sorted_json(at_once.text), name
            assert beside.headers["content-type"] == at_once.headers["content-type"], name
            assert int(beside.headers["content-length"]) == len(beside.content), name


async def test_large_chunks_are_made_on_other_threads_and_say_the_same(
    threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens come at once, as to a client that has read nothing for a while."""
    async with application("--enable-scale-out", put=put) as (app, _), client_of(app) as client:
        for name, (path, fields) in STREAMS.items():
            streamed = {"stream": True, **fields}
            at_once, beside = await both_ways(client, path, streamed, threads, monkeypatch)
            assert without_chance(beside.text) == without_chance(at_once.text), name


async def both_ways(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], threads: list[str],
    patch: pytest.MonkeyPatch,
) -> list[httpx.Response]:  # fmt: skip
    """A call's answer, made on the event loop and beside it."""
    tokens = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": MODEL, tokens: TOKENS, **fields}
    patch.setattr(spelling, "PIECE", 7)
    answers = []
    for many, on in ((10**9, {"MainThread"}), (16, {"answers", "prompt-logprobs"})):
        make_beside(patch, many)
        threads.clear()
        answers.append(answer := await client.post(path, json=body))
        assert answer.status_code == 200, (path, answer.text)
        assert threads
        assert {one.split("_")[0] for one in threads} <= on, path
    return answers


async def test_an_answer_of_many_choices_is_made_on_another_thread_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []
    beside = spelling.make_beside

    async def noted(make: Callable[[], Any]) -> Any:
        def made() -> Any:
            threads.append(threading.current_thread().name.split("_")[0])
            return make()

        return await beside(made)

    monkeypatch.setattr(late_answers, "make_beside", noted)
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": TOKENS}
    texts = []
    async with application(put=put) as (app, _), client_of(app) as client:
        for most in (answers.MANY_CHOICES, 2):
            monkeypatch.setattr(answers, "MANY_CHOICES", most)
            texts.append(sorted_json((await client.post("/v1/completions", json=body)).text))
    assert threads == ["answers"]
    assert texts[0] == texts[1]


async def test_a_stream_with_large_chunks_ends_with_the_error_that_ends_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_beside(monkeypatch, 16)
    body = {"model": MODEL, "stream": True, "prompt": "a", "logprobs": LIKELIEST, "max_tokens": 9}

    def fail(request_id: str, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        said = failure("it can't go on", "final")
        first = put(request_id, request)[:-1]
        return [*first, EngineCoreOutput(
            request_id, [], finish_reason=FinishReason.ERROR, stop_reason=said
        )]  # fmt: skip

    async with application(put=fail) as (app, _), client_of(app) as client:
        answer = await client.post("/v1/completions", json=body)
    chunks = answer.text.strip().split("\n\n")
    assert "top_logprobs" in chunks[0]
    assert "it can't go on" in chunks[-2]
    assert chunks[-1] == "data: [DONE]"


async def test_chunks_that_nobody_waits_for_are_made_no_more() -> None:
    ended: list[str] = []

    async def make(results: Any) -> Any:
        try:
            async for one in results:
                yield one
        finally:
            ended.append("maker")

    async def results() -> Any:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            ended.append("results")

    chunks = answer_chunks.made_chunks(make, results(), lambda one: logprob_counts.MANY + one)
    assert [await anext(chunks), await anext(chunks)] == [1, 1]
    await chunks.aclose()
    assert ended == ["results", "maker"]


async def one_and_no_more(ended: list[str]) -> AsyncGenerator[int, None]:
    """As of a request whose engine is paused after its first token."""
    try:
        yield 1
        await asyncio.Event().wait()
    finally:
        ended.append("results")


async def test_a_maker_that_waits_for_a_result_ends_once_its_client_leaves() -> None:
    ended: list[str] = []

    async def make(results: Any) -> Any:
        try:
            async for one in results:
                yield one
        finally:
            ended.append("maker")

    chunks = answer_chunks.made_chunks(make, one_and_no_more(ended), lambda _: 0)
    assert await anext(chunks) == 1
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    await cancel_tasks(waiting)
    assert ended == ["results", "maker"]


@pytest.mark.parametrize("makes", [True, False])
async def test_a_maker_whose_client_leaves_while_it_makes_a_chunk_ends_after_that(
    makes: bool,
) -> None:
    """makes: whether the result makes a chunk; else the maker waits for the next one."""
    ended: list[str] = []
    begun, going_on = threading.Event(), threading.Event()

    async def make(results: Any) -> Any:
        try:
            async for one in results:
                begun.set()
                going_on.wait(60)
                if makes:
                    yield one
        finally:
            ended.append("maker")

    many = logprob_counts.MANY + 1
    chunks = answer_chunks.made_chunks(make, one_and_no_more(ended), lambda _: many)
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.to_thread(begun.wait, 60)
    await cancel_tasks(waiting)
    assert ended == ["results"]
    going_on.set()
    await until(lambda: ended == ["results", "maker"])


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
