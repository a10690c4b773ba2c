"""The two shapes of answers: completions and chats, whole and in chunks."""

from __future__ import annotations

import time
from typing import Any, Protocol

from kvmig.openai_server.generation import Piece


class Answer(Protocol):
    """One call's. Token counts are of prompt and output."""

    def head(self) -> dict[str, Any] | None:
        """A chunk before the first text, if there is one."""
        ...

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A part of the stream."""
        ...

    def last(self) -> dict[str, Any]:
        """A chunk without text, for the usage."""
        ...

    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
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

    def __init__(self, answer_id: str, model: str) -> None:
        self._base = _base(answer_id, "text_completion", model)

    def head(self) -> None:
        """None."""

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {**self._base, "choices": [_text(piece.text, piece.finish_reason)]}

    def last(self) -> dict[str, Any]:
        return {**self._base, "choices": []}

    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
        return {**self._base, "choices": [_text(text, finish_reason)]}


class ChatAnswer:
    """Of /v1/chat/completions."""

    def __init__(self, answer_id: str, model: str) -> None:
        self._whole = _base(answer_id, "chat.completion", model)
        self._chunk = {**self._whole, "object": "chat.completion.chunk"}

    def head(self) -> dict[str, Any]:
        return self._delta({"role": "assistant", "content": ""}, None)

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return self._delta({"content": piece.text}, piece.finish_reason)

    def last(self) -> dict[str, Any]:
        return {**self._chunk, "choices": []}

    def whole(self, text: str, finish_reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {**self._whole, "choices": [_choice({"message": message}, finish_reason)]}

    def _delta(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        return {**self._chunk, "choices": [_choice({"delta": delta}, finish_reason)]}


def _base(answer_id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def _text(text: str, finish_reason: str | None) -> dict[str, Any]:
    return _choice({"text": text}, finish_reason)


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
