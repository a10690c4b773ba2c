"""Messages as frames: one msgpack header (a tagged union), then raw payload frames.

Everything that arrives is bounded and checked here: what this version can't read
is the peer's mistake (`PeerError`), never a crash of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

import msgspec

from kvmig.ground.errors import PeerError
from kvmig.kvtransfer.messages import Message

Frame = bytes | bytearray | memoryview

MAX_FRAMES = 4096
"""Frames of one message, header included."""
MAX_HEADER = 64 << 20
"""Bytes of a header: a million tokens take a tenth of it."""
MAX_FRAME = 1 << 30
"""Bytes of any frame; the sockets drop a peer that sends more."""


class Codec:
    """Encodes any message; decodes those of one union."""

    def __init__(self, messages: UnionType) -> None:
        """`messages`: the union of the `Message` types that may arrive."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(messages)

    def encode(self, message: Message, payload: Sequence[Frame] = ()) -> list[Frame]:
        """Frames of `message` and its payload; the payload isn't copied."""
        return [self._encoder.encode(message), *payload]

    def decode(self, frames: Sequence[memoryview]) -> tuple[Message, list[memoryview]]:
        """The message and its payload frames. Raises PeerError if they can't be one."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise PeerError(
                f"a message of {len(frames)} frames, allowed are 1 to {MAX_FRAMES}", "oversized"
            )
        header, *payload = frames
        if header.nbytes > MAX_HEADER:
            raise PeerError(
                f"a header of {header.nbytes} bytes, allowed are {MAX_HEADER}", "oversized"
            )
        try:
            return self._decoder.decode(header), payload
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"not a message of this protocol: {error}", "unreadable") from error
