"""A front end keeps nothing of calls that are over, whatever they asked for."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import Counter

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from bench.hostile_bodies import hostile_calls
from tests.support.vllm_application import MODEL, READY, application, client_of

pytestmark = [pytest.mark.engine, pytest.mark.long]
KINDS = (
    "messages", "parts of a message", "calls of tools", "tools", "token ids", "stop strings",
    "bad words", "logit_bias", "logit_bias that is none", "vllm_xargs, names", "unknown field",
    "schema, deep", "choice", "deep JSON", "long text", "/tokenize", "/detokenize", "count_tokens",
    "messages of Anthropic's", "blocks of Anthropic's", "input of responses", "input that is none",
    "name of an adapter", "image", "structural tag", "long stop strings", "texts of /pooling",
)  # fmt: skip
WARM, ROUNDS = 2, 5
KEPT = 300
"""Blocks of Python's memory that each further round may leave: for 27 calls, whose smallest has a
hundred times as many."""


def put(request_id: str, _: EngineCoreRequest) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id, [65], finish_reason=FinishReason.LENGTH)]


async def test_no_call_leaves_anything_behind_once_its_kind_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # pytest keeps the records that reach it, and a refused call's traceback holds its body.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", False)
    calls = [
        one
        for one in hostile_calls(MODEL, READY.max_model_len, KINDS.__contains__)
        if one.size == "fits"
    ]
    assert {one.kind for one in calls} == set(KINDS)
    blocks: list[int] = []
    kept: list[Counter[str]] = []
    async with application(put=put) as (app, _), client_of(app) as client:
        for _ in range(ROUNDS):
            for one in calls:
                headers = {"content-type": "application/json"}
                answer = await client.post(one.path, content=one.body, headers=headers)
                assert answer.status_code < 500, (one.kind, answer.text)
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            kept.append(Counter(type(one).__qualname__ for one in gc.get_objects()))
    grown = (kept[-1] - kept[WARM - 1]).most_common(12)
    threads = [one.name for one in threading.enumerate()]
    assert blocks[-1] - blocks[WARM - 1] < KEPT * (ROUNDS - WARM), (blocks, grown, threads)
