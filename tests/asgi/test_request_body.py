"""What is taken of a refused call's body: kvmig.asgi.request_body."""

from __future__ import annotations

import asyncio
import time

import pytest
from starlette.types import Message

from kvmig.asgi import request_body
from kvmig.asgi.request_body import discard

PART = b"x" * 1000


class SlowClient:
    """Sends `parts` parts of a body, one every pause_s; ends: whether the body ends with them."""

    def __init__(self, parts: int, pause_s: float, *, ends: bool = True) -> None:
        self.parts = parts
        self._pause_s = pause_s
        self._ends = ends

    async def receive(self) -> Message:
        if not self.parts:
            await asyncio.sleep(60)
        await asyncio.sleep(self._pause_s)
        self.parts -= 1
        more = not self._ends or self.parts > 0
        return {"type": "http.request", "body": PART, "more_body": more}


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "DISCARD_PAUSE_S", 0.2)


async def test_a_client_that_still_sends_is_read_to_its_end() -> None:
    client = SlowClient(parts=8, pause_s=0.05)
    await discard(client.receive, 1_000_000)
    assert client.parts == 0


async def test_a_client_that_stops_sending_is_waited_for_a_moment_only() -> None:
    client = SlowClient(parts=1, pause_s=0.0, ends=False)
    began = time.monotonic()
    await discard(client.receive, 1_000_000)
    assert client.parts == 0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("most", "within_s"), [(3000, 30.0), (1_000_000, 0.12)])
async def test_a_client_that_never_ends_is_cut_off_by_bytes_and_time(
    most: int, within_s: float
) -> None:
    client = SlowClient(parts=100, pause_s=0.05, ends=False)
    await discard(client.receive, most, within_s)
    assert client.parts >= 96
