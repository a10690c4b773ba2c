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
    with contextlib.suppress(wave.Error, EOFError), wave.open(io.BytesIO(data)) as file:
        size: int = file.getsampwidth() * file.getnchannels()
        count, rate = min(file.getnframes(), len(data) // max(1, size)), file.getframerate()
    return math.ceil(count / max(1, rate))
