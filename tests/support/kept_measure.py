"""In a process of its own: what vLLM's application keeps of calls that are over.

A process that has run other tests keeps things by itself while the calls go on: pytest keeps the
records of loggers, whose tracebacks hold bodies, and other tests' threads and engines go on.

Prints a line of JSON: `blocks` of Python's memory after each round of the same calls; by how many
they have `grown` in the `rounds` after the first ones; the types of the objects of which most were
`added` then; and the `threads` that there are.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections import Counter
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from bench.hostile_bodies import hostile_calls
from tests.support.vllm_application import MODEL, READY, application, client_of

KINDS = (
    "messages", "parts of a message", "calls of tools", "tools", "token ids", "stop strings",
    "bad words", "logit_bias", "logit_bias that is none", "vllm_xargs, names", "unknown field",
    "schema, deep", "choice", "deep JSON", "long text", "/tokenize", "/detokenize", "count_tokens",
    "messages of Anthropic's", "blocks of Anthropic's", "input of responses", "input that is none",
    "name of an adapter", "image", "structural tag", "long stop strings", "texts of /pooling",
)  # fmt: skip
WARM, ROUNDS = 2, 5
"""What is there after the first rounds may stay: caches and what is imported late."""


def put(request_id: str, _: EngineCoreRequest) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(request_id, [65], finish_reason=FinishReason.LENGTH)]


async def measure() -> dict[str, Any]:
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
    return {
        "blocks": blocks,
        "grown": blocks[-1] - blocks[WARM - 1],
        "rounds": ROUNDS - WARM,
        "added": (kept[-1] - kept[WARM - 1]).most_common(12),
        "threads": [one.name for one in threading.enumerate()],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
