"""The text of an answer: from the end of its prompt, and at a bounded cost a token.

vLLM's stream of text decodes all of a prompt with the first token of each answer: 19 ms of the
event loop for 131,000 tokens, and 16 times that for 16 answers. (Where a prompt ends within a
character, it also gives back the prompt as a part of the answer; here that is the end of it.) While
tokens give no text, it decodes all of them with each further one, and all streams wait for that.
"""

from __future__ import annotations

import logging
from copy import copy
from typing import Any

from vllm.tokenizers.detokenizer_utils import detokenize_incrementally
from vllm.v1.engine import EngineCoreRequest, detokenizer

from kvmig.engines.vllm.decode_stream import (
    FAILURES,
    TAIL,
    WINDOW,
    BoundedDecodeStream,
    InvalidPrefix,
    byte_of,
    continues,
)

logger = logging.getLogger(__name__)

NONE: frozenset[str] = frozenset()


class TailDetokenizer(detokenizer.FastIncrementalDetokenizer):
    """vLLM's own, with a stream that sees the end of a prompt and of what waits."""

    stream: BoundedDecodeStream

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:
        without = copy(request)
        without.prompt_token_ids = None
        super().__init__(tokenizer, without)
        self._special = special_texts(self.tokenizer) if self.skip_special_tokens else NONE
        prompt = request.prompt_token_ids or ()
        self.stream = BoundedDecodeStream(self.tokenizer, prompt, self._special)

    def _protected_step(self, next_token_id: int) -> str | None:
        """Do what vLLM's own does, in its own words."""
        try:
            return self.stream.step(next_token_id)
        except (OverflowError, TypeError):
            logger.exception("Encountered invalid token id: %r", next_token_id)
            return None
        except Exception as error:
            if not str(error).startswith(str(InvalidPrefix())):
                raise
            logger.warning(
                "Encountered invalid prefix detokenization error"
                " for request %s, resetting decode stream.",
                self.request_id,
            )
            self.stream = BoundedDecodeStream(self.tokenizer, (), self._special)
            return self.stream.step(next_token_id)


def special_texts(tokenizer: Any) -> frozenset[str]:
    """Find the texts of a tokenizer's special tokens, once."""
    known: frozenset[str] | None = getattr(tokenizer, "kvmig_special_texts", None)
    if known is None:
        added = tokenizer.get_added_tokens_decoder().values()
        known = frozenset(one.content for one in added if one.special)
        tokenizer.kvmig_special_texts = known
    return known


class WindowDetokenizer(detokenizer.SlowIncrementalDetokenizer):
    """vLLM's own for tokenizers in Python. The end of what waits shows whether there is a text."""

    prefix_offset: int
    _failures = 0
    _again = 0
    """Tokens that wait, below which a token that is a byte isn't tried any more."""

    def decode_next(self, next_token_id: int) -> str:
        waiting = len(self.tokens) - self.read_offset
        text = self._next(next_token_id, waiting)
        if text:
            self.prefix_offset = max(self.prefix_offset, self.read_offset - TAIL)
        elif self.tokens[-2:] == ["", ""] and self._adds_nothing():
            del self.tokens[-1]
        return text

    def _adds_nothing(self) -> bool:
        """Whether the last token, unknown as the one before it, changes no text."""
        if getattr(self.tokenizer, "is_tekken", False):  # where it does once there are bytes
            return False
        end, read = self.tokens[-2 * WINDOW :], self.tokenizer.convert_tokens_to_string
        return bool(read(end) == read(end[:-1]))

    def _next(self, token_id: int, waiting: int) -> str:
        if waiting <= WINDOW:
            self._failures, self._again = 0, 0
            return super().decode_next(token_id)
        before = self.tokens[-2 * WINDOW :]  # every other one may be unknown
        while before and continues(before[0]):
            del before[0]  # a run of bytes that begins within a character would be none
        tokens, end, _, _ = self._decode(token_id, before, 0, 0)
        byte = bool(tokens) and byte_of(tokens[0]) is not None
        if not byte:
            self._failures, self._again = 0, 0
        if not end or waiting < self._again:
            self.tokens.extend(tokens)
            return ""
        text = super().decode_next(token_id)
        if byte and not text:  # of a run with a mistake long before
            self._failures += 1
            if self._failures >= FAILURES:
                self._again = 2 * waiting
        return text

    def _decode(
        self, token_id: int, before: list[str], prefix_offset: int, read_offset: int
    ) -> tuple[list[str], str, int, int]:
        return detokenize_incrementally(
            tokenizer=self.tokenizer,
            all_input_ids=[token_id],
            prev_tokens=before,
            prefix_offset=prefix_offset,
            read_offset=read_offset,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )


def bound_detokenizers() -> None:
    """Let vLLM use these two in this process, from now on."""
    detokenizer.FastIncrementalDetokenizer = TailDetokenizer
    detokenizer.SlowIncrementalDetokenizer = WindowDetokenizer
