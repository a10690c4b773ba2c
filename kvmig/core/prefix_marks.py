"""Marks of a prompt's beginnings, by which a router finds an instance that holds their KV. Pure.

A mark stands for the first 128, 256, ... tokens of a prompt, with all that a prefix cache keeps
apart besides tokens: salt, LoRA adapter, media. It is no promise: a router that errs sends a
request where its prompt is computed again. Engines have block hashes of their own, which depend on
engine, block size and hash; computing vLLM's for a prompt of 8,000 tokens takes milliseconds of a
front end's event loop, these take a tenth of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

MARK_TOKENS = 128
"""Tokens from one mark to the next."""
MARK_BYTES = 8
ID_BYTES = array("I").itemsize
"""Bytes of a token id."""


class MediaSpan(NamedTuple):
    """Tokens that stand for an image, a video or audio."""

    first: int
    end: int
    identifier: str
    """Identifier of its content, as engines know it."""


class MarkChain:
    """The marks of one prompt, or of a request that grows."""

    __slots__ = ("_hash", "_media", "tokens")

    def __init__(self, salt: str, adapter: str, media: Sequence[MediaSpan] = ()) -> None:
        """salt: under which the prompt is cached; adapter: its LoRA adapter; empty: none."""
        self._hash = blake2b(f"{salt}\0{adapter}".encode(), digest_size=MARK_BYTES)
        self._media = media
        self.tokens = 0
        """Tokens that have their marks."""

    def extend(self, tokens: Sequence[int], end: int) -> list[int]:
        """The next marks, up to the first `end` of all `tokens`."""
        first = self.tokens
        end = first + (end - first) // MARK_TOKENS * MARK_TOKENS
        data = memoryview(array("I", tokens[first:end]).tobytes())
        marks = []
        for start in range(first, end, MARK_TOKENS):
            at = (start - first) * ID_BYTES
            self._hash.update(data[at : at + MARK_TOKENS * ID_BYTES])
            self._add_media(start, start + MARK_TOKENS)
            marks.append(int.from_bytes(self._hash.digest()))
        self.tokens = max(first, end)
        return marks

    def _add_media(self, start: int, end: int) -> None:
        for span in self._media:
            if span.first < end and span.end > start:
                self._hash.update(f"{span.first} {span.identifier}\0".encode())
