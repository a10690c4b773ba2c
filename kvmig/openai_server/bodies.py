"""What clients may send. What the engine can't do is taken with its neutral value only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from kvmig.engines.transformers.payload import MOST_LOGPROBS
from kvmig.openai_server.fields import (
    CONTENT,
    MOST_STOP_IDS,
    PROMPT,
    STOPS,
    Only,
    as_prompt,
    as_strings,
    as_text,
    sendable,
)

MOST_CHOICES = 16
"""Of one call."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)


class StreamOptions(_Strict):
    """As of OpenAI, and vLLM's continuous_usage_stats."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """The usage so far, in every chunk."""


class Body(_Strict):
    """What completions and chats have in common."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """None: 1."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[str], BeforeValidator(as_strings), STOPS] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Of no meaning here."""
    # vLLM's own
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MOST_STOP_IDS)]
        | None
    ) = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """None: 1."""
    priority: int = 0
    """Of a class of the cluster: `kvmig.gateway.priorities` has looked."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1, 0, None: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # with neutral values only
    best_of: Annotated[Any, Only(1)] = 1
    min_tokens: Annotated[Any, Only(0)] = 0
    presence_penalty: Annotated[Any, Only(0)] = 0
    frequency_penalty: Annotated[Any, Only(0)] = 0
    repetition_penalty: Annotated[Any, Only(1)] = 1
    logit_bias: Annotated[Any, Only({})] = None

    @field_validator("*", mode="before")
    @classmethod
    def _sendable(cls, value: Any) -> Any:
        return sendable(value)

    @property
    def usage(self) -> StreamOptions:
        """What a stream says about it."""
        return self.stream_options or StreamOptions()


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(as_prompt), PROMPT]
    echo: Annotated[Any, Only(False)] = False
    suffix: Annotated[Any, Only("")] = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Of the tokens, and of so many of the likeliest."""


class Message(_Strict):
    """Of a conversation."""

    role: str
    content: Annotated[str, BeforeValidator(as_text), CONTENT]
    name: str | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Of the likeliest tokens; None: 0."""
    response_format: Annotated[Any, Only({"type": "text"})] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none")] = None


def field_names(*bodies: type[BaseModel]) -> Sequence[str]:
    """For the error that names them."""
    return sorted({name for body in bodies for name in body.model_fields})
