"""Bodies of calls, and their fields as /openapi.json has them.

Fields that the engine can't honour are taken with their neutral value only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvmig.engines.transformers.payload import MOST_LOGPROBS
from kvmig.frontend.admin import whole

MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 64, 256, 1024
"""Bounds of stop strings: each piece of text is compared with all of them."""

_STOP = {"type": "string", "minLength": 1, "maxLength": MOST_STOP_CHARACTERS}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_PROMPTS: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
]
_ONE_PROMPT = {"type": "array", "items": {"anyOf": _PROMPTS}, "minItems": 1, "maxItems": 1}
PROMPT = WithJsonSchema({"anyOf": [*_PROMPTS, _ONE_PROMPT]})
CONTENT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})
STOPS = WithJsonSchema(
    {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}, {"type": "null"}]}
)


class AllowedValues:
    """A field that must have one of these values; the first is the one of calls without it."""

    def __init__(self, *allowed: Any) -> None:
        self._allowed = (*allowed, None)

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self._allowed)}

    def _check(self, value: Any) -> Any:
        for one in self._allowed:
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return value
        words = " or ".join(repr(one) for one in self._allowed if one is not None) or "left out"
        raise PydanticCustomError(
            "unsupported", "must be {words} with this engine", {"words": words}
        )


def sendable(value: Any) -> Any:
    """Itself, if it can go on as a message: no half of a surrogate pair, no number of 65 bits."""
    value = list(map(whole, value)) if isinstance(value, list) else whole(value)
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise PydanticCustomError(
            "unsendable",
            "must be of Unicode text and of numbers that fit in 64 bits, and not be nested deeply",
        ) from error
    return value


def as_strings(value: Any) -> list[str]:
    """Stop strings: one, some or none."""
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, list) or not all(
        isinstance(one, str) and 0 < len(one) <= MOST_STOP_CHARACTERS for one in strings
    ):
        raise PydanticCustomError(
            "stop",
            "must be a string or a list of strings, none empty or longer than {most} characters",
            {"most": MOST_STOP_CHARACTERS},
        )
    if len(strings) > MOST_STOPS:
        raise PydanticCustomError("stop", "must be {most} strings or fewer", {"most": MOST_STOPS})
    return strings


def as_text(value: Any) -> str:
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


def as_prompt(value: Any) -> str | list[int]:
    """A string or token ids, or a list of one such."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    ids = isinstance(value, list) and all(type(one) is int for one in value)
    if not isinstance(value, str) and not ids:
        raise PydanticCustomError("prompt", "must be one prompt: a string or a list of token ids")
    found: str | list[int] = value
    return found


MOST_CHOICES = 16
"""Choices of one call."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)


class StreamOptions(_Strict):
    """OpenAI's stream options and vLLM's continuous_usage_stats."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """The usage so far, in every chunk."""


class GenerationBody(_Strict):
    """Fields that completions and chats share."""

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The default, None, stands for 1."""
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[list[str], BeforeValidator(as_strings), STOPS] = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # without an effect here: whose call it is, and what only OpenAI does with it
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Annotated[Any, AllowedValues("auto", "default")] = None
    # vLLM's own
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=2**32)]], Field(max_length=MOST_STOP_IDS)]
        | None
    ) = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """The default, None, stands for 1."""
    priority: int = 0
    """A configured class's: `kvmig.frontend.middleware` has checked it."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """-1, 0, None: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    # with neutral values only
    best_of: Annotated[Any, AllowedValues(1)] = 1
    min_tokens: Annotated[Any, AllowedValues(0)] = 0
    presence_penalty: Annotated[Any, AllowedValues(0)] = 0
    frequency_penalty: Annotated[Any, AllowedValues(0)] = 0
    repetition_penalty: Annotated[Any, AllowedValues(1)] = 1
    logit_bias: Annotated[Any, AllowedValues({})] = None

    @field_validator("*", mode="before")
    @classmethod
    def _sendable(cls, value: Any) -> Any:
        return sendable(value)

    @property
    def usage(self) -> StreamOptions:
        """The stream options, or the default ones."""
        return self.stream_options or StreamOptions()


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(as_prompt), PROMPT]
    echo: Annotated[Any, AllowedValues(False)] = False
    suffix: Annotated[Any, AllowedValues("")] = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Likeliest tokens whose log-probabilities come with each token's."""


class Message(_Strict):
    """Message of a conversation; an answer's own one, too, as clients send it back."""

    role: str
    content: Annotated[str, BeforeValidator(as_text), CONTENT]
    name: str | None = None
    # what an answer without it has
    refusal: Annotated[Any, AllowedValues("")] = None
    annotations: Annotated[Any, AllowedValues([])] = None
    audio: Annotated[Any, AllowedValues()] = None
    function_call: Annotated[Any, AllowedValues()] = None
    tool_calls: Annotated[Any, AllowedValues([])] = None
    reasoning: Annotated[Any, AllowedValues("")] = None
    reasoning_content: Annotated[Any, AllowedValues("")] = None

    def as_template_has_it(self) -> dict[str, str]:
        """The message for the template, without fields that have no effect."""
        own = self.model_dump(include={"role", "content", "name"}, exclude_none=True)
        if self.role == "developer":  # OpenAI's newer name, which templates don't know
            own["role"] = "system"
        return own


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Number of the likeliest tokens; None: 0."""
    response_format: Annotated[Any, AllowedValues({"type": "text"})] = None
    tools: Annotated[Any, AllowedValues([])] = None
    tool_choice: Annotated[Any, AllowedValues("none", "auto")] = None
    """How tools are chosen; without tools both are the same."""
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, AllowedValues([])] = None
    function_call: Annotated[Any, AllowedValues("none", "auto")] = None
    store: Annotated[Any, AllowedValues(False)] = None
    modalities: Annotated[Any, AllowedValues(["text"])] = None
    audio: Annotated[Any, AllowedValues()] = None
    prediction: Annotated[Any, AllowedValues()] = None
    reasoning_effort: Annotated[Any, AllowedValues()] = None
    verbosity: Annotated[Any, AllowedValues()] = None
    web_search_options: Annotated[Any, AllowedValues()] = None


def field_names(*bodies: type[BaseModel]) -> Sequence[str]:
    """The names of the fields, for the error that names them."""
    return sorted({name for body in bodies for name in body.model_fields})
