"""Kinds of fields of a call's body: how each is read, and its part of /openapi.json."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from kvmig.gateway.admin_models import whole

MOST_STOPS, MOST_STOP_CHARACTERS, MOST_STOP_IDS = 64, 256, 1024
"""Each piece of text is compared with all of them."""

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


class Only:
    """A field that must have one of these values; the first is the one of calls without it."""

    def __init__(self, *allowed: Any, null: bool = True) -> None:
        self._allowed = (*allowed, None) if null else allowed

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
    whole = isinstance(value, list) and all(type(one) is int for one in value)
    if not isinstance(value, str) and not whole:
        raise PydanticCustomError("prompt", "must be one prompt: a string or a list of token ids")
    found: str | list[int] = value
    return found
