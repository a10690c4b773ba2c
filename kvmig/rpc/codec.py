"""Messages as frames: one msgpack header (a tagged union), then raw payload frames.

Everything that arrives is bounded and checked here: what this version can't read
is the peer's mistake (`PeerError`), never a crash of ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Lock
from types import UnionType

import msgspec

from kvmig.core.errors import InvalidTransition, PeerError
from kvmig.rpc.messages import RpcMessage

Frame = bytes | bytearray | memoryview
Frames = Sequence[Frame]

MAX_FRAMES = 4096
"""Frames of one message, header included."""
MAX_HEADER = 64 << 20
"""Bytes of a header: a million tokens take a tenth of it."""
MAX_FRAME = 1 << 30
"""Bytes of any frame; the sockets drop a peer that sends more."""


class MessageCodec:
    """Encodes any message; decodes those of one union."""

    def __init__(self, messages: UnionType) -> None:
        """`messages`: the union of the `RpcMessage` types that may arrive."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[RpcMessage] = msgspec.msgpack.Decoder(messages)

    def encode(self, message: RpcMessage, payload: Frames = ()) -> list[Frame]:
        """Frames of `message` and its payload; the payload isn't copied."""
        return [self._encoder.encode(message), *payload]

    def decode(self, frames: Sequence[memoryview]) -> tuple[RpcMessage, list[memoryview]]:
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


REFUSED = (PeerError, InvalidTransition, msgspec.MsgspecError)
"""Errors of messages that can't be taken, or whose contents can't."""


class RefusalCounter:
    """Counts the messages of others that one process refused, by reason. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def count(self, error: Exception) -> None:
        """Count a message, refused with one of REFUSED."""
        reason = error.reason if isinstance(error, PeerError) else "unusable"
        with self._lock:
            self._counts[reason] += 1

    def count_strangers(self, connections: int) -> None:
        """Count connections that didn't prove that they have the cluster's secret."""
        if connections:
            with self._lock:
                self._counts["unauthenticated"] += connections

    def counts(self) -> dict[str, int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)
