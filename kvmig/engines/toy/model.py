"""A "model" that counts on, until one byte of its KV cache is wrong.

Its tokens are bytes of text. Example: after "Count: 0017 0018" it puts out " 0019 0020".
"""

from __future__ import annotations

import re
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 256
HALF = 8
"""Bytes of a token's key, and of its value."""
LOST = ord("?")
"""What is put out where the KV cache is wrong."""
_NUMBER = re.compile(rb"(\d{4})([ \n])(\d{0,3})$")
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)


def compute(tokens: bytes, first: int) -> NDArray[np.uint64]:
    """Keys and values [tokens - first, 2] of the tokens from `first` on.

    They depend on the token, its place and the one before it.
    """
    padded = np.frombuffer(b"\0" + tokens, np.uint8)[first:].astype(np.uint64)
    places = np.arange(first + 1, len(tokens) + 1, dtype=np.uint64)
    mixed = (padded[1:] << np.uint64(40)) | (padded[:-1] << np.uint64(32)) | places
    return mixed[:, None] * _ODD


def sample(cache: NDArray[np.uint64], tokens: bytes, seed: int | None, counts_by: int = 1) -> int:
    """The next token of a request: counts on without a seed, drawn with one.

    cache: keys and values [tokens, 2] as they are in the request's blocks.
    """
    if not np.array_equal(cache, compute(tokens, 0)):
        return LOST
    if seed is None:
        return _counted(tokens[-16:], counts_by)
    digest = blake2b(b"%d %d %d" % (seed, len(tokens), tokens[-1]), digest_size=8).digest()
    return ord(" ") + int.from_bytes(digest, "little") % 95


def _counted(text: bytes, by: int) -> int:
    """The next digit of the number after the last one, or the space before it.

    After a line's end the last number is said again.
    """
    if (found := _NUMBER.search(text)) is None:
        return ord(" ") if re.search(rb"\d{4}$", text) else ord("0")
    number = (int(found[1]) + by * (found[2] == b" ")) % 10_000
    return (b"%04d" % number)[len(found[3])]
