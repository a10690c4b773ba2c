"""Answers in OpenAI's two shapes: completions and chats, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from pydantic import BaseModel

from kvmig.engines.transformers.payload import TokenLogprob


class OutputToken(NamedTuple):
    """An output token with its log-probabilities."""

    id: int
    logprob: TokenLogprob


class ChoicePiece(NamedTuple):
    """A part of one choice's answer.

    tokens: output tokens so far; logprobs: of this piece's tokens, if they are asked for, whether
    their text is in it or held back.
    """

    text: str
    tokens: int
    finish_reason: str | None
    logprobs: Sequence[OutputToken] = ()


Decode = Callable[[Sequence[int]], str]


class CompletionLogprobs:
    """Log-probabilities of one completion choice; offsets count on from chunk to chunk."""

    def __init__(self, decode: Decode) -> None:
        """decode: of any run of tokens, those that are special too."""
        self._decode = decode
        self._offset = 0

    def render_tokens(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
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

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        tops = zip(logprob.top_ids, logprob.top, strict=True)
        return {self._decode([token]): value for token, value in tops}


class ChatLogprobs:
    """Log-probabilities of chat choices."""

    def __init__(self, decode: Decode) -> None:
        """decode: of any run of tokens, those that are special too."""
        self._decode = decode

    def render_tokens(self, tokens: Sequence[OutputToken]) -> dict[str, Any]:
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


class AnswerWriter(Protocol):
    """Writes the answer to one call, of one choice or several."""

    def head(self, choice: int) -> dict[str, Any] | None:
        """A chunk before a choice's first text, if there is one."""
        ...

    def chunk(self, choice: int, piece: ChoicePiece) -> dict[str, Any]:
        """A part of the stream."""
        ...

    def last(self) -> dict[str, Any]:
        """A chunk without text, for the usage."""
        ...

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The answer without a stream, and without its usage."""
        ...


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """OpenAI's object."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "completion_tokens": output_tokens,
    }


class CompletionAnswer:
    """Answers /v1/completions."""

    def __init__(self, answer_id: str, model: str, choices: int, decode: Decode) -> None:
        """decode: see `CompletionLogprobs`."""
        self._base = _base(answer_id, "text_completion", model)
        self._logprobs = [CompletionLogprobs(decode) for _ in range(choices)]

    def head(self, choice: int) -> None:
        """The first chunk of a choice: there is none."""

    def chunk(self, choice: int, piece: ChoicePiece) -> dict[str, Any]:
        return {**self._base, "choices": [self._choice(choice, piece)]}

    def last(self) -> dict[str, Any]:
        return {**self._base, "choices": []}

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        return {
            **self._base,
            "choices": [self._choice(choice, piece) for choice, piece in enumerate(choices)],
        }

    def _choice(self, choice: int, piece: ChoicePiece) -> dict[str, Any]:
        logprobs = self._logprobs[choice].render_tokens(piece.logprobs) if piece.logprobs else None
        return _choice(choice, {"text": piece.text}, logprobs, piece.finish_reason)


class ChatAnswer:
    """Answers /v1/chat/completions."""

    def __init__(self, answer_id: str, model: str, decode: Decode) -> None:
        """decode: see `ChatLogprobs`."""
        self._whole = _base(answer_id, "chat.completion", model)
        self._chunk = {**self._whole, "object": "chat.completion.chunk"}
        self._logprobs = ChatLogprobs(decode)

    def head(self, choice: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {**self._chunk, "choices": [_choice(choice, {"delta": delta}, None, None)]}

    def chunk(self, choice: int, piece: ChoicePiece) -> dict[str, Any]:
        delta = {"delta": {"content": piece.text}}
        return {**self._chunk, "choices": [self._choice(choice, delta, piece)]}

    def last(self) -> dict[str, Any]:
        return {**self._chunk, "choices": []}

    def whole(self, choices: Sequence[ChoicePiece]) -> dict[str, Any]:
        found = [
            self._choice(choice, {"message": _message(piece.text)}, piece)
            for choice, piece in enumerate(choices)
        ]
        return {**self._whole, "choices": found}

    def _choice(self, choice: int, content: dict[str, Any], piece: ChoicePiece) -> dict[str, Any]:
        logprobs = self._logprobs.render_tokens(piece.logprobs) if piece.logprobs else None
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


# The answers as /openapi.json documents them; the classes above make them.

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    """Tokens of one call."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class TextChoice(BaseModel):
    """Text of a completion. logprobs: parallel lists, where they were asked for."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason


class Completion(BaseModel):
    """Answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatMessage(BaseModel):
    """Message of the assistant."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """Message of a chat. logprobs: `content`, where they were asked for."""

    index: int
    message: ChatMessage
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    """The model under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


EVENTS: dict[str, Any] = {
    "description": "The answer; with `stream`, its chunks as server-sent events.",
    "content": {"text/event-stream": {}},
}
