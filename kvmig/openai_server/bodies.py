"""What clients may send. What the engine can't do is taken with its neutral value only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def only(*allowed: Any) -> BeforeValidator:
    """A field that must have one of these values; the first is the one of calls without it."""

    def check(value: Any) -> Any:
        for one in (*allowed, None):
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return value
        words = " or ".join(repr(one) for one in allowed if one is not None) or "left out"
        raise PydanticCustomError(
            "unsupported", "must be {words} with this engine", {"words": words}
        )

    return BeforeValidator(check)


def _as_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise PydanticCustomError("stop", "must be a string or a list of strings, none empty")
    return strings


def _as_text(value: Any) -> str:
    """The content of a message: a string, or parts that are text."""
    if isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [None]
    texts = [
        one.get("text") for one in parts if isinstance(one, dict) and one.get("type") == "text"
    ]
    if len(texts) != len(parts) or not all(isinstance(one, str) for one in texts):
        raise PydanticCustomError("content", "must be a string or a list of parts of type 'text'")
    return "".join(map(str, texts))


def _as_prompt(value: Any) -> str | list[int]:
    """A string or token ids, or a list of one such."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    whole = isinstance(value, list) and all(type(one) is int for one in value)
    if not isinstance(value, str) and not whole:
        raise PydanticCustomError("prompt", "must be one prompt: a string or a list of token ids")
    found: str | list[int] = value
    return found


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


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
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[str], BeforeValidator(_as_strings)] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Of no meaning here."""
    # vLLM's own
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    # with neutral values only
    n: Annotated[Any, only(1)] = 1
    best_of: Annotated[Any, only(1)] = 1
    top_p: Annotated[Any, only(1)] = 1
    top_k: Annotated[Any, only(0, -1)] = 0
    min_p: Annotated[Any, only(0)] = 0
    min_tokens: Annotated[Any, only(0)] = 0
    presence_penalty: Annotated[Any, only(0)] = 0
    frequency_penalty: Annotated[Any, only(0)] = 0
    repetition_penalty: Annotated[Any, only(1)] = 1
    logit_bias: Annotated[Any, only({})] = None
    priority: Annotated[Any, only(0)] = 0

    @property
    def usage(self) -> StreamOptions:
        """What a stream says about it."""
        return self.stream_options or StreamOptions()


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_as_prompt)]
    echo: Annotated[Any, only(False)] = False
    suffix: Annotated[Any, only("")] = None
    logprobs: Annotated[Any, only()] = None


class Message(_Strict):
    """Of a conversation."""

    role: str
    content: Annotated[str, BeforeValidator(_as_text)]
    name: str | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: Annotated[Any, only(False)] = False
    top_logprobs: Annotated[Any, only(0)] = 0
    response_format: Annotated[Any, only({"type": "text"})] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none")] = None


def field_names(*bodies: type[BaseModel]) -> Sequence[str]:
    """For the error that names them."""
    return sorted({name for body in bodies for name in body.model_fields})
