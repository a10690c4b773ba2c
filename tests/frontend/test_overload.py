"""Admission: when too many wait, further calls are answered 429; those of high priority last."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bench.load.stub import StubEngine
from kvmig.asgi.call import HttpCall
from kvmig.core.config import ClusterConfig, HttpConfig, check
from kvmig.core.errors import ConfigError
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.frontend.load_shedding import LoadShedding, OverloadReason
from tests.support.stubbed_front import Stubbed, stubbed_front

LONGEST_S = LoadShedding.LONGEST_S
HIGH = PriorityClass("high", -1)


def test_one_more_than_the_limit_is_refused() -> None:
    shedding = LoadShedding(2)
    shedding.hold(0, 1, 0.0)
    assert shedding.refusal(0, 0, 0.0) is None
    shedding.hold(0, 1, 0.0)
    assert shedding.refusal(0, 0, 0.0) == OverloadReason(2, 2, LONGEST_S)


def test_what_waits_in_queues_counts_whoever_sent_it() -> None:
    shedding = LoadShedding(2)
    assert shedding.refusal(0, 1, 0.0) is None
    refusal = shedding.refusal(0, 5, 0.0)
    assert refusal is not None
    assert refusal.waiting == 5


def test_without_a_limit_nothing_is_refused() -> None:
    shedding = LoadShedding(0)
    shedding.hold(0, 1_000_000, 0.0)
    assert shedding.refusal(0, 1_000_000, 0.0) is None


def test_those_that_run_after_it_are_no_reason_to_refuse_a_request() -> None:
    shedding = LoadShedding(2)
    shedding.hold(0, 2, 0.0)
    assert shedding.refusal(-1, 0, 0.0) is None
    shedding.hold(-1, 2, 0.0)
    assert shedding.refusal(-1, 0, 0.0) is not None


def test_those_that_run_before_it_are() -> None:
    shedding = LoadShedding(2)
    shedding.hold(-1, 2, 0.0)
    assert shedding.refusal(0, 0, 0.0) is not None


@pytest.mark.parametrize(("every_s", "told_s"), [(0.5, 5), (0.01, 1), (20.0, 60)])
def test_the_client_is_told_when_those_ahead_have_begun(every_s: float, told_s: int) -> None:
    shedding = LoadShedding(10)
    shedding.hold(0, 60, 0.0)
    for step in range(1, 51):
        shedding.hold(0, -1, step * every_s)
    refusal = shedding.refusal(0, 0, 50 * every_s)
    assert refusal == OverloadReason(10, 10, told_s)


class Count:
    """What a call's changes come to."""

    def __init__(self) -> None:
        self.waiting = 0

    def hold(self, change: int) -> None:
        self.waiting += change


def test_a_call_counts_as_one_until_its_requests_are_there_and_then_as_those() -> None:
    call, count = HttpCall(), Count()
    call.enter(count.hold)
    assert count.waiting == 1
    call.submitted("a")
    call.submitted("b")
    assert count.waiting == 2
    call.began("a")
    call.began("a")
    assert count.waiting == 1
    call.ended("b")
    assert count.waiting == 0
    assert call.request_ids == {"a"}


def test_a_call_counts_as_all_the_sequences_that_it_asks_for_before_they_are_there() -> None:
    call, count = HttpCall(), Count()
    call.enter(count.hold, 3)
    assert count.waiting == 3
    call.submitted("a")
    call.began("a")
    assert count.waiting == 2
    for one in "bcd":  # a fourth was not foreseen
        call.submitted(one)
    assert count.waiting == 3


def test_a_call_is_refused_that_asks_for_more_sequences_than_there_is_room_for() -> None:
    shedding = LoadShedding(10)
    shedding.hold(0, 7, 0.0)
    assert shedding.refusal(0, 0, 0.0, sequences=3) is None
    assert shedding.refusal(0, 0, 0.0, sequences=4) is not None


def test_one_account_leaves_room_for_others() -> None:
    shedding = LoadShedding(100)
    while shedding.refusal(0, 0, 0.0, "greedy") is None:
        shedding.hold(0, 1, 0.0, "greedy")
    refusal = shedding.refusal(0, 0, 0.0, "greedy")
    assert refusal is not None
    assert (refusal.waiting, refusal.own) == (50, True)
    assert shedding.refusal(0, 0, 0.0, "other", sequences=25) is None


def test_a_call_that_ends_early_counts_no_more() -> None:
    call, count = HttpCall(), Count()
    call.enter(count.hold)
    call.end_call()
    assert count.waiting == 0
    call.submitted("a")  # nobody counts it now
    assert count.waiting == 0


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (HttpConfig(max_waiting=-1), "--max-waiting"),
        (HttpConfig(max_n=0), "--max-n"),
        (HttpConfig(max_prompts=0), "--max-prompts"),
        (HttpConfig(max_media=0), "--max-media"),
        (HttpConfig(max_unread=-1), "--max-unread"),
        (HttpConfig(send_timeout_s=0.0), "--send-timeout"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_by_name(config: HttpConfig, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check(ClusterConfig(http=config))


class HoldsBack:
    """Has an engine's new requests wait."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine, self._submit = engine, engine.submit
        self._held: list[tuple[Any, ...]] = []
        self._came = asyncio.Event()
        engine.submit = self._hold  # type: ignore[assignment, method-assign]

    def _hold(self, *request: Any) -> None:
        self._held.append(request)
        self._came.set()

    async def holds(self, count: int) -> None:
        """Wait until it has so many."""
        async with asyncio.timeout(60):
            while len(self._held) < count:
                self._came.clear()
                await self._came.wait()

    def let_go(self) -> None:
        """They run, and so do later ones."""
        self._engine.submit = self._submit  # type: ignore[method-assign]
        for request in self._held:
            self._submit(*request)


async def post(front: Stubbed, priority: str = "normal") -> httpx.Response:
    async with front.client({"x-vllm-priority": priority}) as client:
        return await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})


async def test_a_call_too_many_is_429_with_a_time_and_the_others_go_on() -> None:
    http = HttpConfig(max_waiting=1)
    async with stubbed_front(http, (HIGH, NORMAL)) as front:
        assert (await post(front)).status_code == 200
        engine = HoldsBack(front.engine)
        one = asyncio.create_task(post(front))
        await engine.holds(1)
        refused = await post(front)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= LONGEST_S
        error = json.loads(refused.content)["error"]
        assert (error["type"], error["code"]) == ("RateLimitError", 429)
        assert "allowed are 1 (--max-waiting)" in error["message"]
        assert front.counted("kvmig_requests_refused_total", priority_class="normal") == 1
        other = asyncio.create_task(post(front, priority="high"))
        await engine.holds(2)
        assert (await post(front, priority="high")).status_code == 429
        engine.let_go()
        assert (await one).status_code == (await other).status_code == 200
        assert (await post(front)).status_code == 200


@pytest.mark.parametrize(
    ("body", "sentence", "param"),
    [
        ({"prompt": "a", "n": 17}, "n is 17, allowed are 16 a call (--max-n)", "n"),
        ({"prompt": "a", "n": 17, "use_beam_search": True}, "n is 17, allowed are 16", "n"),
        ({"prompt": ["a"] * 3}, "prompt has 3 prompts, allowed are 2 a call", "prompt"),
        ({"prompt": [[1]] * 3}, "prompt has 3 prompts, allowed are 2 a call", "prompt"),
        ({"prompt": ["a", "b"], "n": 5}, "asks for 10 sequences (n times its prompts)", None),
        ({"prompt": "a", "n": 500, "top_p": float("nan")}, "n is 500, allowed are 16", "n"),
    ],
)
async def test_a_call_of_too_many_sequences_is_refused_before_an_engine_has_any(
    body: dict[str, Any], sentence: str, param: str | None
) -> None:
    http = HttpConfig(max_waiting=9, max_prompts=2)
    as_json = {"content-type": "application/json"}
    async with stubbed_front(http) as front, front.client(as_json) as client:
        answer = await client.post("/v1/completions", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert sentence in error["message"]
