"""What bench.takeover makes of the hosts that were lost."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from bench.takeover import LostHost, summarise, until_answered


def test_the_longest_time_without_a_server_is_told_beside_the_median() -> None:
    samples = [LostHost(0, 1.9, 3.0, 0), LostHost(1, 2.1, 9.0, 2), LostHost(2, 2.0, 4.0, 1)]
    assert summarise(samples) == {
        "rounds": 3,
        "server_s": 2.0,
        "server_longest_s": 2.1,
        "model_s": 4.0,
        "model_longest_s": 9.0,
        "refused": 3,
    }


@pytest.mark.parametrize("first", [httpx.ConnectError("refused"), httpx.Response(503)])
async def test_calls_that_are_not_answered_are_counted_until_one_is(
    first: httpx.ConnectError | httpx.Response,
) -> None:
    answers: Iterator[httpx.ConnectError | httpx.Response] = iter([first, httpx.Response(200)])

    def answer(_: httpx.Request) -> httpx.Response:
        found = next(answers)
        if isinstance(found, httpx.ConnectError):
            raise found
        return found

    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer), base_url="http://x"
    ) as client:
        assert await until_answered(client, "GET", "/v1/models") == 1
