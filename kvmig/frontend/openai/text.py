"""Text out of tokens, while they come: whole characters only, up to a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

CONTEXT = 6
"""Tokens of the prompt before the first output token that decide how it is written (a space)."""
REPLACEMENT = "\ufffd"
WINDOW = 32
"""Tokens that may wait before only the end of them is decoded for each one more."""
KEPT = 1024
"""Tokens of the last text, on which the writing of the next one depends."""
FAILURES = 8
"""Texts that the end promised and that weren't there, in one wait, before it is asked seldom."""


class StreamDetokenizer:
    """Pieces that give, one after the other, what the tokens after a prompt read.

    Tokens that give no text (bytes that are no character, or nothing that the tokenizer knows) wait
    until there is one. Beyond a few, their end shows whether there may be: a token costs as much
    however many wait.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        """decode: of any run of tokens, with U+FFFD for bytes that are no text."""
        self._decode = decode
        self._ids = list(prompt[-CONTEXT:])
        self._begin = 0
        self._read = len(self._ids)
        self._failures = 0
        self._again = 0
        """Tokens that wait, below which it isn't asked whether there is a text."""

    def add(self, token_id: int) -> str:
        """Add a token; the text that is certain with it, empty in the midst of a character."""
        self._ids.append(token_id)
        waiting = len(self._ids) - self._read
        if waiting > WINDOW and not self._may_end(waiting):
            return ""
        piece = self._piece()
        if not piece or piece.endswith(REPLACEMENT):
            if waiting > WINDOW:
                self._failures += 1
                self._again = 2 * waiting if self._failures >= FAILURES else 0
            return ""
        self._begin = max(self._read, len(self._ids) - KEPT)
        self._read = len(self._ids)
        self._failures = self._again = 0
        return piece

    def rest(self) -> str:
        """The text that was held back, when no token comes any more."""
        piece = self._piece()
        self._begin = self._read = len(self._ids)
        return piece

    def _may_end(self, waiting: int) -> bool:
        """Whether this many tokens may end with a text."""
        if waiting < self._again:
            return False
        end = self._decode(self._ids[-WINDOW:])
        return bool(end) and not end.endswith(REPLACEMENT)

    def _piece(self) -> str:
        before = self._decode(self._ids[self._begin : self._read])
        after = self._decode(self._ids[self._begin :])
        # A prompt may end in the midst of a character: U+FFFD before, a letter after.
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        return after[len(list(same)) :]


class CutText(NamedTuple):
    """text: what the client may have; stopped: a stop string has come, which is not part of it."""

    text: str
    stopped: bool


class StopStrings:
    """Ends a text at the first stop string, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def add(self, text: str) -> CutText:
        """More text; character by character or in pieces, as it comes."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held = self._held[: min(found)], ""
            return CutText(text, True)
        held = self._tail()
        text, self._held = self._held[: len(self._held) - held], self._held[-held:] if held else ""
        return CutText(text, False)

    def rest(self) -> str:
        """The text that was held back, when no text comes any more."""
        text, self._held = self._held, ""
        return text

    def _tail(self) -> int:
        """Length of the longest end of what is held with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
