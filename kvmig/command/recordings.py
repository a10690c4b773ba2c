"""How long a recording is, where no server gives its seconds. Pure."""

from __future__ import annotations

import contextlib
import io
import math
import wave

BYTES_A_SECOND = 16_000
"""Bytes of a compressed recording that count as a second: 128 kbit/s."""


def seconds_of(data: bytes) -> int:
    """Seconds, rounded up: a WAV file's by its header, and any other's by its bytes."""
    count, rate = len(data), BYTES_A_SECOND
    # RuntimeError: a chunk of it is longer than what holds it.
    with contextlib.suppress(wave.Error, EOFError, RuntimeError), wave.open(io.BytesIO(data)) as it:
        size: int = it.getsampwidth() * it.getnchannels()
        there = len(data) // max(1, size)
        # Decoders read a header that names no frames as one of a recording without a known end.
        count, rate = min(it.getnframes() or there, there), it.getframerate()
    return max(math.ceil(count / max(1, rate)), min(1, len(data)))
