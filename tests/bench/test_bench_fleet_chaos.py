"""What bench.fleet_chaos says of calls and orders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest

from bench.fleet_chaos import Call, Orders, counted, follow, is_excused, make_call
from kvmig_tools.fleet import FleetUp

Answer = Callable[[httpx.Request], httpx.Response]


class Answering:
    """A fleet whose door is a function."""

    def __init__(self, answer: Answer, users: tuple[str, ...] = ()) -> None:
        self._answer = answer
        self._users = users

    def client(self) -> httpx.AsyncClient:
        transport = httpx.MockTransport(self._answer)
        return httpx.AsyncClient(transport=transport, base_url="http://x")

    def get(self, path: str) -> Any:
        return {"data": [{"name": name} for name in self._users]}


def fleet(answer: Answer, *users: str) -> FleetUp:
    return cast("FleetUp", Answering(answer, users))


def stream(*texts: str, end: str = "data: [DONE]\n\n") -> httpx.Response:
    events = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n" for text in texts]
    return httpx.Response(200, text="".join(events) + end)


def error() -> str:
    return f"data: {json.dumps({'error': {'message': 'its deployment ended'}})}\n\n"


ALL = counted(17, 10)


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        (stream(ALL[:4], ALL[4:]), "right"),
        (stream(ALL[:4]), "wrong"),
        (stream(ALL, end=""), "wrong"),
        (stream(ALL[:4], end=error()), "told"),
        (stream(ALL[:4], end=error() + "data: [DONE]\n\n"), "told"),
        (httpx.Response(503, json={"error": {"message": "no room"}}), "told"),
    ],
)
async def test_a_stream_is_right_told_or_wrong(answer: httpx.Response, fate: str) -> None:
    call = Call("m", 0.0, 17, 10)
    async with fleet(lambda _: answer).client() as http:
        await follow(call, http, True, 11)
    assert call.fate == fate


def whole(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"text": text}]})


def asked(request: httpx.Request) -> tuple[int, int, bool]:
    body = json.loads(request.content)
    return int(body["prompt"].split()[1]), body["max_tokens"], body["stream"]


def say(right: bool) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        start, tokens, streams = asked(request)
        text = counted(start, tokens)
        text = text if right else text[:-1] + "?"
        return stream(text) if streams else whole(text)

    return answer


async def test_one_wrong_token_is_found() -> None:
    for seed in range(20):
        assert (await make_call(fleet(say(True)), "m", random.Random(seed))).fate in (
            "right", "left",
        )  # fmt: skip
        assert (await make_call(fleet(say(False)), "m", random.Random(seed))).fate == "wrong"


async def test_a_connection_that_breaks_is_excused_by_a_proxy_that_died_meanwhile_only(
) -> None:  # fmt: skip
    def broken(_: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("peer closed connection")

    call = await make_call(fleet(broken), "m", random.Random(1))
    assert call.fate == "broken"
    killed = [call.began - 1, call.ended + 1]
    assert not is_excused(call, killed)
    killed.append((call.began + call.ended) / 2)
    assert is_excused(call, killed)


def test_an_order_is_half_done_if_it_is_otherwise_than_was_told() -> None:
    orders = Orders(fleet(say(True), "a", "b", "d"))
    orders.told = {"a": 201, "b": 503, "c": 201, "d": 0, "e": 503}
    assert orders.half_done() == ["b: 503, there", "c: 201, not there"]
