"""What bench.scale_down says of streams, of calls that come while a model ends, and of gaps."""

from __future__ import annotations

from typing import cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.client import Stream, StreamFailed
from bench.drain import Sample
from bench.replace import counted
from bench.report import missed
from bench.scale_down import STREAMS, TARGETS, Counting, Fate, Knock, Run, Seen, knock, summarise


class Given:
    """A stream of which these tokens come, then no more."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens: list[int] = []
        self._come = tokens

    async def reach(self, tokens: int) -> None:
        self.tokens = self._come[:tokens]
        if len(self.tokens) < tokens:
            raise StreamFailed("its connection ended")


async def fate(tokens: list[int]) -> Fate:
    async with aiohttp.ClientSession() as http:
        one = Counting(http, "http://x", "m", 3, 500)
        one.stream = cast("Stream", Given(tokens))
        return await one.fate("fleet", 0, 500)


async def test_a_stream_that_comes_to_its_end_is_right_by_each_of_its_tokens() -> None:
    right = counted(300, 500)
    assert await fate(right) == Fate("fleet", 0, 500, 500, True, "")
    assert not (await fate([*right[:450], 0, *right[451:]])).right


async def test_a_stream_that_breaks_off_is_right_as_far_as_it_came_and_says_why() -> None:
    cut = await fate(counted(300, 260))
    assert (cut.came, cut.right) == (260, True)
    assert "its connection ended" in cut.error


RIGHT = bytes(counted(41, 5)).decode()


@pytest.mark.parametrize(
    ("status", "body", "honest"),
    [
        (200, {"choices": [{"text": RIGHT}]}, True),
        (200, {"choices": [{"text": RIGHT[:-1]}]}, False),
        (404, {"error": {"message": "no model 'm'"}}, True),
        (503, {"error": {"message": "m is off"}}, True),
        (503, {"error": {"message": ""}}, False),
        (503, {}, False),
        (500, {"error": {"message": "it ended"}}, False),
    ],
)
async def test_a_call_while_a_model_ends_is_answered_in_full_or_told_that_it_is_not_there(
    status: int, body: dict[str, object], honest: bool
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        found = await knock(http, str(server.make_url("")).rstrip("/"), 0, 0.0)
    assert (found.status, found.honest) == (status, honest)


async def test_a_call_without_an_answer_is_not_told_honestly() -> None:
    async with aiohttp.ClientSession() as http:
        found = await knock(http, "http://127.0.0.1:1", 0, 0.0)
    assert (found.status, found.honest) == (0, False)


def seen(*fates: Fate, ran: int = STREAMS) -> Seen:
    def drained(longest_ms: float) -> Sample:
        return Sample(0, 900.0, 10.0, 12.0, longest_ms)

    return Seen(
        {"fleet": [drained(one) for one in (11, 22, 44)], "plain": [drained(20)]},
        [drained(15)],
        list(fates),
        [Knock(0, 0.1, 0.2, 404, True, "no model")],
        [Run("fleet", 0, "rm", 0.1, [1], ran, 0.5), Run("plain", 0, "", 0.1, [1])],
    )


WHOLE = Fate("fleet", 0, 500, 500, True, "")


def test_gaps_are_steps_of_the_stream_and_compared_with_the_drain_s() -> None:
    figures = summarise(seen(WHOLE))
    assert figures["scale-down, longest gap in steps, fleet, median"] == pytest.approx(2.2)
    assert figures["scale-down, longest gap in steps, fleet, worst"] == pytest.approx(4.4)
    assert figures["scale-down, median gap over a drain's"] == pytest.approx(1.1)
    assert figures["end, longest gap in steps, worst"] == pytest.approx(1.5)
    assert missed(figures, TARGETS) == []


@pytest.mark.parametrize(
    ("fate", "what"),
    [
        (Fate("plain", 0, 500, 500, False, ""), ["wrong"]),
        (Fate("fleet", 0, 500, 450, True, "it broke off"), ["lost tokens", "dropped"]),
        (Fate("fleet", 0, 500, 500, True, "an error at the end"), ["dropped"]),
    ],
)
def test_a_stream_that_is_not_whole_and_right_misses_a_target(fate: Fate, what: list[str]) -> None:
    figures = summarise(seen(WHOLE, fate))
    assert [line.partition(" is ")[0] for line in missed(figures, TARGETS)] == what


def test_an_end_that_finds_no_stream_misses_its_target() -> None:
    assert len(missed(summarise(seen(WHOLE, ran=STREAMS - 1)), TARGETS)) == 1
