"""Who writes a stream is shown to clients that ask for it."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvmig.asgi.answer_writers import HEADER
from kvmig.core.config import HttpConfig
from tests.support.stubbed_front import stubbed_front


@pytest.mark.parametrize("asks", [True, False])
async def test_a_stream_names_the_instance_before_its_first_token_if_it_is_asked(
    asks: bool,
) -> None:
    async with stubbed_front(HttpConfig()) as front:
        front.metronome.set(500.0)
        body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True}).encode()
        head = [
            "POST /v1/completions HTTP/1.1", "host: here", "content-type: application/json",
            f"content-length: {len(body)}", "connection: close", *([f"{HEADER}: 1"] * asks),
        ]  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
    comment = b': kvmig {"instance":"i0","token":0}'
    assert answer.count(b": kvmig") == answer.count(comment) == asks
    if asks:
        assert answer.index(comment) < answer.index(b'"text":"~')
