"""A "model" that gives the wrong tokens as soon as one byte of its KV cache is wrong."""

from __future__ import annotations

from hashlib import blake2b

VOCABULARY = 50021
HALF = 8
"""Bytes of a token's key, and of its value."""


def compute(token: int, position: int, before: bytes) -> bytes:
    """Key and value of a token; `before`: those of the token before it, or nothing."""
    return blake2b(b"%d %d " % (token, position) + before, digest_size=2 * HALF).digest()


def sample(cache: bytes, seed: int | None) -> int:
    """The next token of a request, from all its keys and values; greedy without a seed."""
    salt = b"" if seed is None else b"%d" % seed
    return int.from_bytes(blake2b(cache + salt, digest_size=8).digest(), "little") % VOCABULARY
