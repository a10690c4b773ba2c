"""What a front end keeps of one call's answer is bounded, whatever the call asks for."""

from __future__ import annotations

from typing import Any

import pytest

from kvmig.asgi import answer_room
from kvmig.asgi.answer_room import MOST_LOGPROBS, MOST_TOKENS, AnswerRoom
from kvmig.asgi.call import HttpCall
from kvmig.controlplane.messages import AbortRequests
from kvmig.core.errors import AnswerTooLarge
from kvmig.engines.client_request import ClientRequest
from kvmig.frontend.requests import LiveRequest
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.splice import StreamSplicer
from tests.support.fake_llumlet import cluster
from tests.support.http_calls import in_call
from tests.support.inside import look_at_readers

pytestmark = pytest.mark.usefixtures("small_room")
TOKENS, LOGPROBS = 40, 20


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_room, "MOST_TOKENS", TOKENS)
    monkeypatch.setattr(answer_room, "MOST_LOGPROBS", LOGPROBS)


def test_tokens_and_their_logprobs_share_one_room() -> None:
    room = AnswerRoom()
    room.count_kept(TOKENS // 2, LOGPROBS // 2)
    assert not room.full()
    assert room.full(unread=0.1)
    room.count_kept(1, 0)
    assert room.full()


def test_a_log_probability_takes_more_room_than_a_token() -> None:
    assert MOST_LOGPROBS < MOST_TOKENS


async def submit(router: FrontendRouter, *names: str, **fields: Any) -> HttpCall:
    with in_call(HttpCall()) as call:
        for name in names:
            await router.submit(ClientRequest(name, "cmpl-x-0", 20, 0, [b""], **fields))
    return call


@pytest.mark.parametrize(("logprobs", "fits"), [(0, TOKENS), (1, 13), (4, 4)])
async def test_an_answer_that_is_given_whole_ends_when_it_is_too_large(
    logprobs: int, fits: int
) -> None:
    async with cluster(instances=1) as it:
        (llumlet,) = it.llumlets
        await submit(it.router, "r", "s", whole=True, logprobs=logprobs)
        await submit(it.router, "other", whole=True, logprobs=logprobs)
        for _ in range(3):
            await llumlet.hear()
        llumlet.step(("r", 0, 0, [7] * (fits - 1)), ("s", 0, 0, [7]), ("other", 0, 0, [7]))
        await it.front.until(lambda: len(it.front.tokens.get("other", [])) == 1)
        assert it.front.failed == {}
        llumlet.step(("s", 0, 1, [7]))
        await it.front.until(lambda: bool(it.front.failed))
        assert it.front.failed == dict.fromkeys(("r", "s"), answer_room.sentence())
        assert it.front.final == ["r", "s"]
        assert await llumlet.hear() == AbortRequests(["r", "s"])
        assert it.router.live() == ["other"]


async def test_sequences_that_have_ended_still_count() -> None:
    async with cluster(instances=1) as it:
        (llumlet,) = it.llumlets
        await submit(it.router, "r", "s", whole=True)
        llumlet.step(("r", 0, 0, [7] * TOKENS), last=["r"])
        await it.front.until(lambda: it.router.live() == ["s"])
        llumlet.step(("s", 0, 0, [7]))
        await it.front.until(lambda: list(it.front.failed) == ["s"])


async def test_a_stream_may_be_as_long_as_it_likes() -> None:
    async with cluster(instances=1) as it:
        (llumlet,) = it.llumlets
        await submit(it.router, "r", whole=False, logprobs=3)
        llumlet.step(("r", 0, 0, [7] * 10 * TOKENS), last=["r"])
        await it.front.until(lambda: it.router.live() == [])
        assert it.front.failed == {}


async def test_a_stream_that_is_not_read_ends_when_too_much_of_it_waits() -> None:
    async with cluster(instances=1) as it:
        (llumlet,) = it.llumlets
        call = await submit(it.router, "r", "s", whole=False, logprobs=3)
        call.stopped_reading()
        llumlet.step(("r", 0, 0, [7]), ("s", 0, 0, [7]))
        await it.front.until(lambda: len(it.front.tokens) == 2)
        look_at_readers(it.router)
        llumlet.step(("r", 0, 1, [7] * 2), ("s", 0, 1, [7] * 2))
        await it.front.until(lambda: len(it.front.tokens["s"]) == 3)
        look_at_readers(it.router)
        assert it.front.failed == {}
        llumlet.step(("s", 0, 3, [7] * 2))
        await it.front.until(lambda: set(it.front.failed) == {"r", "s"})


async def test_a_prompt_has_only_so_many_log_probabilities() -> None:
    async with cluster(instances=1) as it:
        await submit(it.router, "r", whole=True, prompt_logprobs=LOGPROBS)
        with pytest.raises(AnswerTooLarge, match=f"{LOGPROBS} log-probabilities"):
            await submit(it.router, "s", whole=False, prompt_logprobs=LOGPROBS + 1)
        with pytest.raises(AnswerTooLarge):  # all prompts of a call count together
            await submit(it.router, "t", "u", whole=True, prompt_logprobs=LOGPROBS // 2 + 1)
        assert "s" not in it.router.live()


async def test_embeddings_have_only_so_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_room, "MOST_NUMBERS", 100)
    async with cluster(instances=1) as it:
        await submit(it.router, "r", "s", whole=False, numbers=50)
        with pytest.raises(AnswerTooLarge, match="100 numbers of embeddings"):
            await submit(it.router, "t", "u", "v", whole=False, numbers=50)


def test_what_a_client_has_read_does_not_count() -> None:
    call = HttpCall()
    request = LiveRequest("r", "r", "r", StreamSplicer("i0"), 1, 0, (), 0.0, call=call, logprobs=3)
    request.splicer.next = 100
    assert not call.has_too_much([request])
    call.stopped_reading()
    assert not call.has_too_much([request])
    request.splicer.next = 110
    assert call.has_too_much([request])
