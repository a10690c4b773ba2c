"""Beams of one search share their prompt and their beginnings, and give the same answers."""

from __future__ import annotations

import tracemalloc
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.entrypoints.generate.beam_search import online
from vllm.entrypoints.generate.beam_search.utils import BeamSearchSequence
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from kvmig.frontend.openai.vllm.shared_beams import SharedBeam, SharedList
from tests.support.vllm_application import MODEL, application, client_of

pytestmark = pytest.mark.engine
EOS = 258
"""Of the bundled model."""
BEAMS, STEPS = 6, 30
LIST_BYTES = 8
"""Of a list, for each item."""


def put(request_id: str, request: EngineCoreRequest) -> list[EngineCoreOutput]:
    """Likely tokens by the prompt's last ones; the end of the answer is always among them."""
    params, prompt = request.sampling_params, request.prompt_token_ids
    assert params is not None
    assert prompt is not None
    chance = np.random.default_rng([len(prompt), *prompt[-3:]])
    ids = chance.choice(200, size=(1, 1 + (params.num_logprobs or 0)), replace=False)
    ids[0, -1] = EOS
    logprobs = -np.sort(chance.random(ids.shape).astype(np.float32))
    lists = LogprobsLists(ids.astype(np.int32), logprobs, np.ones(1, np.int32))
    return [EngineCoreOutput(
        request_id, [int(ids[0, 0])], lists, finish_reason=FinishReason.LENGTH
    )]  # fmt: skip


async def search(client: httpx.AsyncClient, prompt: int, **more: Any) -> list[Any]:
    """The answers of a search over a prompt of so many tokens."""
    body = {
        "model": MODEL, "prompt": [65] * prompt, "use_beam_search": True, "n": BEAMS,
        "max_tokens": STEPS, "temperature": 0.0, **more,
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices: list[Any] = answer.json()["choices"]
    return choices


@pytest.mark.parametrize("more", [{}, {"logprobs": 3, "length_penalty": 0.3, "ignore_eos": True}])
async def test_a_search_gives_what_vllms_own_beams_give(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with application(put=put) as (app, _), client_of(app) as client:
        assert online.BeamSearchSequence is SharedBeam
        shared = await search(client, 20, **more)
        monkeypatch.setattr(online, "BeamSearchSequence", BeamSearchSequence)
        assert await search(client, 20, **more) == shared
    assert len({choice["text"] for choice in shared}) > 1


async def test_what_a_search_holds_of_its_prompt_does_not_grow_with_its_steps() -> None:
    async with application(put=put) as (app, _), client_of(app) as client:
        peaks = []
        for prompt in (10, 10, 1_100):  # the first one is for what is made once
            tracemalloc.start()
            try:
                await search(client, prompt)
                peaks.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
    lists = (peaks[2] - peaks[1]) / (LIST_BYTES * 1_100)
    assert lists < 10 * BEAMS, peaks  # each of the 180 beams that might have ended had its own


@given(st.lists(st.integers()), st.lists(st.lists(st.integers(), max_size=3)))
def test_a_shared_list_is_as_a_list(start: list[int], more: list[list[int]]) -> None:
    plain, shared, every = list(start), SharedList(list(start)), list[tuple[list[int], Any]]()
    for items in more:
        plain, shared = plain + items, shared + items
        every.append((plain, shared))
    for wanted, found in every:
        assert found.to_list() == list(found) == wanted
        assert len(found) == len(wanted)
        assert found[1:] == wanted[1:]
        assert found[:-1] == wanted[:-1]
        if wanted:
            assert (found[-1], found[0]) == (wanted[-1], wanted[0])
