"""Cohere's chats, of vLLM's application, as Cohere's own client has them. With its package only."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from kvmig.frontend.openai.vllm import cohere_answers, spelling
from tests.support.vllm_application import MODEL, application, client_of

cohere: Any = pytest.importorskip("cohere", reason="needs Cohere's package")
serving: Any = pytest.importorskip("vllm.entrypoints.cohere.serving")

pytestmark = pytest.mark.engine
TOKENS = 40
PATH = "/cohere/v2/chat"
BODY = {
    "model": MODEL, "messages": [{"role": "user", "content": 'a "b"'}], "max_tokens": TOKENS,
    "logprobs": True,
}  # fmt: skip


def put(request_id: str, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    """Tokens, with a log-probability each where those are asked for."""
    assert request.sampling_params is not None
    wanted = request.sampling_params.num_logprobs is not None
    outputs = []
    for number in range(TOKENS):
        ids = np.full((1, 1), number + 30, dtype=np.int32)
        lists = LogprobsLists(ids, -ids.astype(np.float32) / 3, np.ones(1, np.int32))
        end = FinishReason.LENGTH if number == TOKENS - 1 else None
        outputs.append(
            EngineCoreOutput(
                request_id, [number + 30], lists if wanted else None, finish_reason=end
            )
        )
    return outputs


@pytest_asyncio.fixture
async def http(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that serves Cohere's chats."""
    monkeypatch.setenv("VLLM_ENABLE_COHERE_API", "1")
    async with application(put=put) as (app, _), client_of(app) as client:
        yield client


async def test_a_large_chat_is_made_on_another_thread_and_says_the_same(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spelling, "PIECE", 7)
    threads = set[str]()
    make = serving.CohereServingChatV2._build_logprobs

    def noted(choice: Any) -> Any:
        threads.add(threading.current_thread().name.split("_")[0])
        return make(choice)

    monkeypatch.setattr(serving.CohereServingChatV2, "_build_logprobs", staticmethod(noted))
    texts = []
    for many, thread in ((10**9, "MainThread"), (16, "answers")):
        monkeypatch.setattr(cohere_answers, "MANY", many)
        threads.clear()
        answer = await http.post(PATH, json=BODY)
        assert answer.status_code == 200, answer.text
        assert threads == {thread}
        assert int(answer.headers["content-length"]) == len(answer.content)
        texts.append({**json.loads(answer.text), "id": ""})
    assert texts[0] == texts[1]
    assert len(texts[0]["logprobs"]) == TOKENS


async def test_coheres_own_client_reads_chats_streams_and_errors(http: httpx.AsyncClient) -> None:
    client = cohere.AsyncClientV2(
        api_key="none", base_url=f"{http.base_url}/cohere".replace("//cohere", "/cohere"),
        httpx_client=http,
    )  # fmt: skip
    asked = {key: value for key, value in BODY.items() if key != "logprobs"}
    answer = await client.chat(**BODY)
    assert answer.finish_reason == "MAX_TOKENS"
    assert len(answer.logprobs) == TOKENS
    text = answer.message.content[0].text
    pieces = [
        event.delta.message.content.text
        async for event in client.chat_stream(**asked)
        if event.type == "content-delta"
    ]
    assert "".join(pieces) == text
    with pytest.raises(cohere.errors.NotFoundError, match="nobody"):
        await client.chat(**{**asked, "model": "nobody"})
