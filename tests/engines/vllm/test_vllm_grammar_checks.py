"""Grammars are checked beside the event loop, once for all prompts of a call, each user's apart."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from kvmig.engines.vllm.grammar_checks import SMALL, GrammarChecks
from tests.support.vllm_application import MODEL, application, client_of

pytestmark = pytest.mark.engine


class Counted:
    """In place of vLLM's check: notes on which threads it ran."""

    def __init__(self) -> None:
        self.threads: list[str] = []

    def __call__(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        self.threads.append(threading.current_thread().name)
        if wanted.regex and "wrong" in wanted.regex:
            raise VLLMValidationError("it is wrong")
        return StructuredOutputsParams(grammar="checked")


class Body:
    """Of a call."""


def asking(regex: str) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex))


async def test_a_large_grammar_is_checked_once_for_all_prompts_on_another_thread() -> None:
    counted = Counted()
    checks = GrammarChecks(counted)
    calls = [asking("a" * (SMALL + 1)) for _ in range(50)]
    await asyncio.gather(*(checks.check(one, "salt") for one in calls))
    (thread,) = counted.threads
    assert thread.startswith("grammars")
    for one in calls:
        assert one.structured_outputs is not None
        assert one.structured_outputs.grammar == "checked"
    checks.close()


async def test_a_grammar_that_many_sequences_follow_is_smaller() -> None:
    checks = GrammarChecks(Counted(), lambda: 256)
    await checks.check(asking("a" * 3500), "")
    with pytest.raises(VLLMValidationError, match="for each of 256 sequences, allowed are 1048576"):
        await checks.check(asking("a" * 5000), "")
    checks.close()


async def test_a_small_grammar_waits_for_no_large_one() -> None:
    counted = Counted()
    checks = GrammarChecks(counted)
    for _ in range(3):
        await checks.check(asking("a"), "")
    assert counted.threads == [threading.current_thread().name]
    checks.close()


async def test_users_share_no_check() -> None:
    counted = Counted()
    checks = GrammarChecks(counted)
    for salt in ("one", "other"):
        await checks.check(asking("a" * (SMALL + 1)), salt)
    assert len(counted.threads) == 2
    checks.close()


@pytest.mark.parametrize("regex", ["wrong", "wrong" * SMALL])
async def test_every_call_with_a_wrong_grammar_is_refused(regex: str) -> None:
    checks = GrammarChecks(Counted())
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="it is wrong"):
            await checks.check(asking(regex), "")
    checks.close()


async def test_what_is_remembered_of_a_wrong_grammar_holds_no_call() -> None:
    checks, body = GrammarChecks(Counted()), Body()
    held = weakref.ref(body)

    async def call(body: Body) -> None:
        await checks.check(asking("wrong"), "")

    with pytest.raises(VLLMValidationError, match="it is wrong"):
        await call(body)
    del body
    gc.collect()
    assert held() is None
    checks.close()


class Odd(ValueError):
    """An error that can't be copied."""

    def __init__(self, at: int, why: str) -> None:
        super().__init__(f"{why} at {at}")


@pytest.mark.parametrize("error", [Odd(3, "wrong"), AttributeError("wrong"), KeyError("wrong")])
async def test_whatever_a_check_fails_of_the_call_is_to_blame(error: Exception) -> None:
    def check(_: StructuredOutputsParams) -> StructuredOutputsParams:
        raise error

    checks = GrammarChecks(check)
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match=r"can't be used: .?wrong") as raised:
            await checks.check(asking("a"), "")
        assert raised.value.parameter == "structured_outputs"
    checks.close()


async def test_a_call_that_leaves_takes_the_check_from_no_other_one() -> None:
    going, counted = threading.Event(), Counted()

    def slow(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        assert going.wait(10)
        return counted(wanted)

    checks = GrammarChecks(slow)
    leaves, stays = (asyncio.create_task(checks.check(asking("a" * 2 * SMALL), "")) for _ in "ab")
    await asyncio.sleep(0.05)
    leaves.cancel()
    await asyncio.wait([leaves])
    going.set()
    await stays
    assert len(counted.threads) == 1
    checks.close()


async def test_the_event_loop_goes_on_beside_a_schema_that_takes_long() -> None:
    slow = {"type": "string", "pattern": "^(a|b){1,99}$"}
    schema = {"type": "object", "properties": {f"p{one}": slow for one in range(800)}}
    body: dict[str, Any] = {
        "model": MODEL, "prompt": ["a"] * 8, "max_tokens": 2,
        "structured_outputs": {"json": schema},
    }  # fmt: skip
    gaps: list[float] = []

    async def turn() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.005)
            gaps.append(time.thread_time() - began)

    async with application() as (app, _), client_of(app) as client:
        turning = asyncio.create_task(turn())
        answer = await client.post("/v1/completions", json=body)
        turning.cancel()
        refused = await client.post(
            "/v1/completions", json={**body, "structured_outputs": {"json": {"type": "none"}}}
        )
    assert answer.status_code == 503, answer.text  # what ends its requests here
    assert refused.status_code == 400, refused.text
    assert max(gaps) < 0.4, max(gaps)  # on the event loop it would be 8 times 0.4 s in one
