"""What /openapi.json says of the answers under /v1; `answers` makes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class Usage(BaseModel):
    """Tokens of one call."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class TextChoice(BaseModel):
    """What a completion reads. logprobs: parallel lists, where they were asked for."""

    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason


class Completion(BaseModel):
    """Of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ChatMessage(BaseModel):
    """The assistant's."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """What the assistant says. logprobs: `content`, where they were asked for."""

    index: int
    message: ChatMessage
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """Of /v1/chat/completions."""

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
    """Of /v1/models."""

    object: Literal["list"]
    data: list[Model]


EVENTS: dict[str, Any] = {
    "description": "The answer; with `stream`, its chunks as server-sent events.",
    "content": {"text/event-stream": {}},
}
