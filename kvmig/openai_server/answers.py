"""The two shapes of answers: completions and chats, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from kvmig.openai_server.generation import Piece
from kvmig.openai_server.tokens import ChatLogprobs, CompletionLogprobs, Decode


class Answer(Protocol):
    """One call's, of one choice or several. Token counts are of prompt and output."""

    def head(self, choice: int) -> dict[str, Any] | None:
        """A chunk before a choice's first text, if there is one."""
        ...

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        """A part of the stream."""
        ...

    def last(self) -> dict[str, Any]:
        """A chunk without text, for the usage."""
        ...

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        """The answer without a stream, but for its usage."""
        ...


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """OpenAI's object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


class CompletionAnswer:
    """Of /v1/completions."""

    def __init__(self, answer_id: str, model: str, choices: int, decode: Decode) -> None:
        """decode: see `CompletionLogprobs`."""
        self._base = _base(answer_id, "text_completion", model)
        self._logprobs = [CompletionLogprobs(decode) for _ in range(choices)]

    def head(self, choice: int) -> None:
        """None."""

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        return {**self._base, "choices": [self._choice(choice, piece)]}

    def last(self) -> dict[str, Any]:
        return {**self._base, "choices": []}

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        return {
            **self._base,
            "choices": [self._choice(choice, piece) for choice, piece in enumerate(choices)],
        }

    def _choice(self, choice: int, piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs[choice].of(piece.logprobs) if piece.logprobs else None
        return _choice(choice, {"text": piece.text}, logprobs, piece.finish_reason)


class ChatAnswer:
    """Of /v1/chat/completions."""

    def __init__(self, answer_id: str, model: str, decode: Decode) -> None:
        """decode: see `ChatLogprobs`."""
        self._whole = _base(answer_id, "chat.completion", model)
        self._chunk = {**self._whole, "object": "chat.completion.chunk"}
        self._logprobs = ChatLogprobs(decode)

    def head(self, choice: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {**self._chunk, "choices": [_choice(choice, {"delta": delta}, None, None)]}

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        delta = {"delta": {"content": piece.text}}
        return {**self._chunk, "choices": [self._choice(choice, delta, piece)]}

    def last(self) -> dict[str, Any]:
        return {**self._chunk, "choices": []}

    def whole(self, choices: Sequence[Piece]) -> dict[str, Any]:
        found = [
            self._choice(choice, {"message": _message(piece.text)}, piece)
            for choice, piece in enumerate(choices)
        ]
        return {**self._whole, "choices": found}

    def _choice(self, choice: int, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        logprobs = self._logprobs.of(piece.logprobs) if piece.logprobs else None
        return _choice(choice, content, logprobs, piece.finish_reason)


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}


def _base(answer_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def _choice(
    index: int,
    content: dict[str, Any],
    logprobs: dict[str, Any] | None,
    finish_reason: str | None,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
