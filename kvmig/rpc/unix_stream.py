"""Messages on a Unix stream between two processes of one user: msgpack behind its length."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

LENGTH_BYTES = 4
MOST_BYTES = 1 << 28
"""Most bytes of a message: a snapshot with a million keys has some 200 MB."""


def send_message(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Put one message on its way."""
    body = msgspec.msgpack.encode(message)
    writer.write(len(body).to_bytes(LENGTH_BYTES, "big") + body)


async def receive_message(reader: asyncio.StreamReader, kind: Any) -> Any:
    """The next message. Raises EOFError, ConnectionError, or ValueError for what is none."""
    size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if size > MOST_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
