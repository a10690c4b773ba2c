"""What calls may say to a KV connector: a fleet's clients nothing, others an object."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from fastapi import FastAPI
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from kvmig.core.config import HttpConfig
from tests.support.http_states import behind_middleware
from tests.support.vllm_application import MODEL, application, client_of

pytestmark = pytest.mark.engine

DOOR = {"x-kvmig-account": "key", "x-kvmig-tenant": "ann"}
OTHERS = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
    "remote_block_ids": [[1, 2, 3]], "remote_host": "10.0.0.1", "remote_port": 5600,
}  # fmt: skip
"""Blocks that another engine has of whichever prompt."""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TEXT = {"prompt": "a", "max_tokens": 1}
IDS = {"token_ids": [1, 2]}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**TEXT, "kv_transfer_params": OTHERS}),
    ("/v1/chat/completions", {**CHAT, "kv_transfer_params": OTHERS}),
    ("/v1/completions", {**TEXT, "vllm_xargs": {"kv_transfer_params": "x"}}),
    ("/inference/v1/generate", {**IDS, "sampling_params": {}, "kv_transfer_params": OTHERS}),
    (
        "/inference/v1/generate",
        {**IDS, "sampling_params": {"extra_args": {"kv_transfer_params": OTHERS}}},
    ),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "kv_transfer_params": OTHERS}),
    ("/v1/messages", {**CHAT, "kv_transfer_params": OTHERS}),
]


class Connected:
    """An application whose engines have a KV connector."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.told: list[Any] = []
        """What requests say to the connector."""

    async def ask(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, str]:
        async with client_of(self.app, **headers) as client:
            answer = await client.post(path, json={"model": MODEL, **body})
        return answer.status_code, answer.text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connected() -> AsyncIterator[Connected]:
    told: list[Any] = []

    def put(request_id: str, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        assert request.sampling_params is not None
        told.append((request.sampling_params.extra_args or {}).get("kv_transfer_params"))
        return [EngineCoreOutput(request_id, [30], finish_reason=FinishReason.LENGTH)]

    transfer = '--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    async with application(transfer, "--enable-scale-out", put=put) as (app, _):
        behind_middleware(app, HttpConfig(uds="/socket"), added=True)
        made = Connected(app)
        made.told = told
        yield made


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_fleets_client_names_no_blocks_of_other_engines(
    connected: Connected, path: str, body: dict[str, Any]
) -> None:
    connected.told.clear()
    status, said = await connected.ask(path, body, **DOOR)
    if status == 404:
        pytest.skip(f"the application has no {path}")
    assert (status, connected.told) == (400, []), said
    assert "kv_transfer_params must be left out" in said


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_of_ones_own_may_name_blocks_and_a_fleets_client_may_call_without(
    connected: Connected,
) -> None:
    connected.told.clear()
    body = {**TEXT, "kv_transfer_params": OTHERS}
    assert (await connected.ask("/v1/completions", body))[0] == 200
    assert (await connected.ask("/v1/completions", TEXT, **DOOR))[0] == 200
    assert connected.told == [OTHERS, None]


@pytest.mark.asyncio(loop_scope="module")
async def test_parameters_that_are_no_object_are_refused_by_name(connected: Connected) -> None:
    """The connector would look into them within the engine's step."""
    connected.told.clear()
    body = {**TEXT, "vllm_xargs": {"kv_transfer_params": "x"}}
    status, said = await connected.ask("/v1/completions", body)
    assert (status, connected.told) == (400, [])
    assert "kv_transfer_params is a str, must be an object" in said
