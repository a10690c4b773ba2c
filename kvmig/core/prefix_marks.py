"""Marks of a prompt's beginnings, by which a router finds an instance that holds their KV. Pure.

A mark stands for the first 128, 256, ... tokens of a prompt, with all that a prefix cache keeps
apart besides tokens: salt, LoRA adapter, media. It is no promise: a router that errs sends a
request where its prompt is computed again. Engines have block hashes of their own, which depend on
engine, block size and hash; computing vLLM's for a prompt of 8,000 tokens takes milliseconds of a
front end's event loop, these take less than a tenth of one.

A mark is a sum over the tokens so far, each times a weight of its place, modulo 2^64
(`kvmig.engines.held_marks.MARK_METHOD` changes with how marks are made). Two prompts
with the same mark can be made on purpose by one who knows the salt; all that this achieves is that
a request goes where its prompt isn't held.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b, shake_256
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MARK_TOKENS = 128
"""Tokens from one mark to the next."""
MARK_BYTES = 8

_SEED = shake_256(b"kvmig prefix marks").digest(8 * (MARK_TOKENS + 1))
_ODD: NDArray[np.uint64] = np.frombuffer(_SEED, "<u8").astype(np.uint64) | np.uint64(1)
_WEIGHTS: NDArray[np.uint64] = _ODD[:MARK_TOKENS]
"""A weight for each token's place between two marks."""
_GROWTH = int(_ODD[MARK_TOKENS])
"""The weights after a mark are those before it times this, modulo 2^64."""
_MODULUS = 1 << 64
POWERS: NDArray[np.uint64] = np.multiply.accumulate(
    np.array([1] + [_GROWTH] * 8191, dtype=np.uint64)
)
"""The powers of `_GROWTH` for the marks of a million tokens."""


class MediaSpan(NamedTuple):
    """Tokens that stand for an image, a video or audio."""

    first: int
    end: int
    identifier: str
    """Identifier of its content, as engines know it."""


class MarkChain:
    """The marks of one prompt, or of a request that grows."""

    __slots__ = ("_mark", "_media", "tokens")

    def __init__(self, salt: str, adapter: str, media: Sequence[MediaSpan] = ()) -> None:
        """salt: under which the prompt is cached; adapter: its LoRA adapter; empty: none."""
        self._mark = _number_of(f"{salt}\0{adapter}")
        self._media = media
        self.tokens = 0
        """Tokens that have their marks."""

    def extend(self, tokens: Sequence[int], end: int) -> list[int]:
        """The next marks, up to the first `end` of all `tokens`."""
        first = self.tokens
        count = (end - first) // MARK_TOKENS
        if count <= 0:
            return []
        if count > len(POWERS):
            half = first + count // 2 * MARK_TOKENS
            return [*self.extend(tokens, half), *self.extend(tokens, end)]
        self.tokens = end = first + count * MARK_TOKENS
        # A slice of the whole would take a sixth as long as all that follows.
        whole = not first and isinstance(tokens, list) and len(tokens) - end < MARK_TOKENS
        some = tokens if whole else tokens[first:end]
        numbers = array("Q")
        numbers.fromlist(some if isinstance(some, list) else list(some))  # faster than `array` is
        rows = np.frombuffer(numbers, np.uint64, count * MARK_TOKENS).reshape(count, MARK_TOKENS)
        sums = rows @ _WEIGHTS
        if self._media:
            sums += self._media_numbers(first, count)
        sums *= POWERS[:count]
        if first:
            sums *= pow(_GROWTH, first // MARK_TOKENS, _MODULUS)
        np.add.accumulate(sums, out=sums)
        sums += self._mark
        marks: list[int] = sums.tolist()
        self._mark = marks[-1]
        return marks

    def _media_numbers(self, first: int, count: int) -> NDArray[np.uint64]:
        """What media add to each of the next `count` sums, from the token `first` on."""
        added = [0] * count
        for span in self._media:
            number = _number_of(f"{span.first} {span.identifier}")
            begin = max((span.first - first) // MARK_TOKENS, 0)
            for row in range(begin, min(-(-(span.end - first) // MARK_TOKENS), count)):
                added[row] += number
        return np.array([one % _MODULUS for one in added], np.uint64)


@lru_cache(maxsize=1024)
def _number_of(words: str) -> int:
    return int.from_bytes(blake2b(words.encode(), digest_size=MARK_BYTES).digest())
