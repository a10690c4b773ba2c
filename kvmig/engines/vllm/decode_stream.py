"""The text of one answer out of its tokens, at a bounded cost per token.

tokenizers' `DecodeStream` keeps the tokens since the last text that was certain, and decodes them
all with each further one. Tokens without a text (unknown to the tokenizer, or special and left out)
and bytes that make no character give none for thousands of tokens; each of them then takes longer
than the one before. Here the end of what waits shows whether there can be a text.

The texts are those of `DecodeStream`, token by token. A token without a text is left out by its
`decode`, so what waits can do without. Whether bytes end in the midst of a character depends on the
last four; where bytes are tokens of their own (`ByteFallback`), a run of them with one mistake has
no character until it ends. A decoder of some third kind, for which the end of what waits promises a
text that isn't there, is asked seldom after a few failures: its text may come late then.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import tokenizers
from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
WINDOW = 32
"""Tokens that may wait before only their end is looked at; and the length of that end."""
TAIL = 1024
"""Tokens before that can matter: a character, or a run of bytes that are one, has few."""
SOUGHT = 16_384
"""Tokens at the end of a prompt among which one with a text is looked for."""
FAILURES = 8
"""Texts that were promised and weren't there, in one wait, before it is asked more seldom."""
INVALID_PREFIX = "Invalid prefix encountered"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class InvalidPrefix(Exception):
    """The text so far isn't the beginning of the text with one token more."""

    def __init__(self) -> None:
        super().__init__(INVALID_PREFIX)


class ByteRun:
    """A run of tokens that are bytes, each its own (`<0xE2>`), as `ByteFallback` reads them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._broken = False
        self.text = ""
        """The last character, if the run is text up to here; else empty."""

    def add(self, value: int) -> None:
        """One more byte."""
        if self._broken:
            return
        try:
            self.text = self._decoder.decode(bytes([value]))
        except UnicodeDecodeError:
            self._broken, self.text = True, ""


class BoundedDecodeStream:
    """tokenizers' `DecodeStream` of one answer; `step` it with each token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], special: frozenset[str]
    ) -> None:
        """special: texts of tokens that are left out."""
        self._tokenizer = tokenizer
        self._special = special
        self._skips = bool(special)
        self._prompt = self._tail_of(prompt)
        """The end of the prompt, as long as it may still come out: it ends within a character."""
        self._before: list[int] = []
        """The tokens of the last text."""
        self._waiting: list[int] = []
        """Tokens since, without those that have no text."""
        self._without = 0
        """How many there were of those, lately."""
        self._stream: tokenizers.decoders.DecodeStream | None
        """The stream; None while only ends are looked at."""
        self._begin(self._prompt)

    def step(self, token_id: int) -> str | None:
        """The text that is certain with this token; None: there is none. Raises InvalidPrefix."""
        if self._stream is None:
            return self._wait(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text is not None:
            if self._prompt and self._before:
                self._prompt = []
            if self._waiting:
                self._before, self._waiting = [*self._waiting, token_id], []
            else:
                self._before = [token_id]
            self._without = 0
            return text
        if self._token(token_id) is None:
            self._without += 1
        else:
            self._waiting.append(token_id)
        if len(self._waiting) + self._without > WINDOW:
            self._look_at_ends()
        return None

    def _begin(self, ids: list[int]) -> None:
        """Go on with tokenizers' own, after these."""
        # Looked up there each time, as vLLM does: other tokenizers put their own in its place.
        self._stream = tokenizers.decoders.DecodeStream(ids=ids, skip_special_tokens=self._skips)

    def _look_at_ends(self) -> None:
        """Look at ends only from now on, until there is a text."""
        self._stream = None
        self._failures, self._again = 0, 0
        self._run: ByteRun | None = None
        self._bytes = "ByteFallback" in str(self._tokenizer.decoder)
        # As tokenizers: a prompt that ends in the midst of a character comes out with its rest.
        whole = self._prompt and self._decode(self._prompt).endswith(REPLACEMENT)
        if not self._before or whole:
            self._before = [*self._prompt, *self._before]
        self._prompt = []
        text = self._decode(self._before)
        self._unread = text.endswith(REPLACEMENT)
        self._prefix = "" if self._unread else text
        if self._bytes:
            for one in (*self._before, *self._waiting):
                self._follow_bytes(self._token(one) or "")

    def _wait(self, token_id: int) -> str | None:
        token = self._token(token_id)
        if token is None:
            return None
        self._waiting.append(token_id)
        if not self._may_end(token):
            return None
        text = self._decode([*self._before, *self._waiting])
        begun = self._prefix
        if len(text.encode()) <= len(begun.encode()) or text.endswith(REPLACEMENT):
            self._failures += 1
            if self._failures >= FAILURES:
                self._again = 2 * len(self._waiting)
            return None
        if not text.startswith(begun):
            raise InvalidPrefix
        read = [*self._before, *self._waiting] if self._unread else self._waiting
        self._before, self._waiting, self._without = self._tail_of(read), [], 0
        self._begin(self._before)
        return text[len(begun) :]

    def _may_end(self, token: str) -> bool:
        """Whether there may be a text with what has just begun to wait."""
        if self._bytes and self._follow_bytes(token):
            assert self._run is not None
            return self._run.text not in ("", REPLACEMENT)
        if len(self._waiting) < self._again:
            return False
        end = self._decode([*self._before[-WINDOW:], *self._waiting[-WINDOW:]][-WINDOW:])
        return bool(end) and not end.endswith(REPLACEMENT)

    def _follow_bytes(self, token: str) -> bool:
        """Whether the token is a byte."""
        byte = byte_of(token)
        if byte is None:
            self._run = None
            return False
        if self._run is None:
            self._run = ByteRun()
        self._run.add(byte)
        return True

    def _token(self, token_id: int) -> str | None:
        """The token as the tokenizer writes it; None: one without a text."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token in self._special else token

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips)

    def _tail_of(self, ids: Sequence[int]) -> list[int]:
        """The last of these that can matter for what comes after them."""
        end = len(ids)
        for end in range(len(ids), max(0, len(ids) - SOUGHT), -1):
            if self._token(ids[end - 1]) is not None:
                break
        tail = list(ids[max(0, end - TAIL) : end])
        while tail and len(tail) >= TAIL - 3 and continues(self._tokenizer.id_to_token(tail[0])):
            del tail[0]  # a run of bytes that begins within a character would be none
        return tail


def byte_of(token: object) -> int | None:
    """The byte that a token is; None: it is something else."""
    found = _BYTE.fullmatch(token) if isinstance(token, str) else None
    return None if found is None else int(found[1], 16)


def continues(token: object) -> bool:
    """Whether a token is a byte in the midst of a character."""
    byte = byte_of(token)
    return byte is not None and 0x80 <= byte < 0xC0
