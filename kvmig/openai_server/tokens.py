"""Log-probabilities of an answer's tokens, in OpenAI's two shapes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvmig.engines.transformers.payload import Logprob


class Token(NamedTuple):
    """One that was put out."""

    id: int
    logprob: Logprob


Decode = Callable[[Sequence[int]], str]


class CompletionLogprobs:
    """Of one choice, over all its chunks: offsets count on from chunk to chunk."""

    def __init__(self, decode: Decode) -> None:
        """decode: of any run of tokens, those that are special too."""
        self._decode = decode
        self._offset = 0

    def of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """OpenAI's object."""
        texts = [self._decode([token.id]) for token in tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob.value for token in tokens],
            "tokens": texts,
            "top_logprobs": [
                {text: token.logprob.value} | self._top(token.logprob)
                for text, token in zip(texts, tokens, strict=True)
            ],
        }

    def _top(self, logprob: Logprob) -> dict[str, float]:
        tops = zip(logprob.top_ids, logprob.top, strict=True)
        return {self._decode([token]): value for token, value in tops}


class ChatLogprobs:
    """Of one choice."""

    def __init__(self, decode: Decode) -> None:
        """decode: of any run of tokens, those that are special too."""
        self._decode = decode

    def of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "content": [
                self._one(token.id, token.logprob.value)
                | {
                    "top_logprobs": [
                        self._one(top, value)
                        for top, value in zip(token.logprob.top_ids, token.logprob.top, strict=True)
                    ]
                }
                for token in tokens
            ]
        }

    def _one(self, token_id: int, value: float) -> dict[str, Any]:
        text = self._decode([token_id])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}
