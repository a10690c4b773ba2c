"""A vLLM engine whose KV cache lies in a way that kvmig can't move serves all the same."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.engines.base import Emitted, Frame, RequestState
from kvmig.ground.errors import UnsupportedLayout
from tests.environment import environment
from tests.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine

WHY = "7 kinds of cache"
TOKENS = 60


@pytest.mark.filterwarnings("ignore")
async def test_it_answers_and_says_of_itself_and_of_each_request_why_none_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedLayout(WHY)

    def hear(client: int, emitted: list[Emitted], frames: list[Frame]) -> None:
        for one in engine.decode_outputs(frames):
            tokens.extend(one.token_ids)
            if one.finish_reason:
                finished.set_result(one.finish_reason)

    tokens: list[int] = []
    finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with environment(ENVIRONMENT):
        from kvmig.engines.vllm import factory, memory

        monkeypatch.setattr(memory, "SharedCache", refuse)
        engine = factory()
    try:
        engine.connect(hear, lambda *done: None, lambda error: None)
        engine.submit(1, "r", engine.encode_request([1] * 40, TOKENS))
        rows: list[RequestState] = []
        while not rows:
            rows = await engine.requests()
        assert await asyncio.wait_for(finished, 300) == "length"
    finally:
        await engine.close(5.0)
    assert (engine.unmovable, rows[0].unmovable, len(tokens)) == (WHY, WHY, TOKENS)
    assert engine.layout.block_bytes == 0
