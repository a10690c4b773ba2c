"""What a server's answer says of its own use, and what stands for it where it says nothing. Pure.

A usage of the server's counts as it is, and text that comes after it is added until the next
usage. Where there is none yet, text counts: a token for every four bytes, rounded up, and of a
stream one for every event with text at least. Of an answer that is no stream nothing comes before
its end: a client that leaves before pays for the time that the server worked (`AnswerPace`).
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec import Raw

from kvmig.accounts.usage import MOST_COUNT
from kvmig.asgi.route_table import ClientRoute
from kvmig.command.call_plan import TOKEN_BYTES, CallPlan
from kvmig.command.event_splitter import data_of


class _Choice(msgspec.Struct):
    text: Any = None
    delta: Any = None
    message: Any = None


class _Answer(msgspec.Struct):
    """An answer, or an event of one, of any API: what matters of it here."""

    choices: list[_Choice] | None = None
    usage: Any = None
    type: Any = None
    delta: Any = None
    """Text, or Anthropic's part of a block."""
    text: Any = None
    message: Any = None
    response: Any = None
    output: Any = None
    content: Any = None
    data: Raw = Raw()
    """Embeddings or images, which are large and are not decoded."""
    duration: Any = None
    """Seconds of a recording."""


_TEXTS = (
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "text",
    "thinking",
    "partial_json",
)
_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_CACHED = ("prompt_tokens_details", "input_tokens_details")
_ANTHROPIC_CACHE = ("cache_read_input_tokens", "cache_creation_input_tokens")


PACE_FIRST = 100.0
"""Tokens per second of one answer, until a deployment's whole answers have shown another pace."""
PACE_WEIGHT = 0.1
"""Weight of a new answer in the average."""
PACE_LEAST = 16
"""Tokens of the shortest answer that shows a pace."""


class AnswerPace:
    """How many tokens per second one deployment's servers give an answer that is no stream."""

    def __init__(self) -> None:
        self._shown: float | None = None

    def learn_answer(self, tokens: int, sequences: int, seconds: float) -> None:
        """A whole answer of `sequences` has come, `seconds` after its call was sent."""
        if tokens < PACE_LEAST or seconds <= 0:
            return
        pace = tokens / max(1, sequences) / seconds
        before = pace if self._shown is None else self._shown
        self._shown = before + PACE_WEIGHT * (pace - before)

    def estimate_output(self, seconds: float, sequences: int, most: int) -> int:
        """Tokens that a server has made of an answer in that time: a token of each sequence at
        least. most: what the call's limits allow."""
        pace = PACE_FIRST if self._shown is None else self._shown
        return min(most, max(1, sequences) * math.ceil(max(1.0, pace * seconds)))


class AnswerCount:
    """The count of one call."""

    def __init__(self, route: ClientRoute, plan: CallPlan, sequences: int) -> None:
        self._route = route
        self._sequences = sequences
        self._estimated = plan.prompt
        self.characters = plan.characters
        self.seconds = plan.seconds
        self.images = plan.images
        self._prompt: int | None = None
        self._output: int | None = None
        self._text_bytes = 0
        self._events = 0
        self.cached = 0

    @property
    def prompt(self) -> int:
        """Tokens of its prompts."""
        return self._estimated if self._prompt is None else self._prompt

    @property
    def output(self) -> int:
        """Tokens of its answers."""
        if self._route.charge != "tokens":
            return 0
        later = max(self._events, -(-self._text_bytes // TOKEN_BYTES))
        return min(MOST_COUNT, (self._output or 0) + later)

    def take_whole(self, body: bytes, *, json: bool) -> None:
        """An answer that is no stream. json: else it is text."""
        found = _read(body) if json else None
        if found is None:
            self._text_bytes += len(body)
            return
        self._take_usage(found.usage)
        self._take_units(found)
        if self._output is None:
            size = _text_size(found)
            self._text_bytes += size if size or self._output_known(found) else len(body)

    def take_left(self, tokens: int) -> None:
        """The client has left before an answer that is no stream. tokens: what the server had made
        of it, estimated."""
        self._output = tokens

    def take_event(self, event: bytes) -> bool:
        """One event of a stream; whether it holds nothing but the usage."""
        data = data_of(event)
        if not data or data == b"[DONE]":
            return False
        found = _read(data)
        if found is None:
            self._text_bytes += len(data)
            return False
        nested = found.response if found.response is not None else found.message
        usage = found.usage
        if usage is None and isinstance(nested, dict):
            usage = nested.get("usage")
        if (size := _text_size(found)) and not _repeats(found):
            self._text_bytes += size
            self._events += 1
        # vLLM's continuous usage is of one choice: with several, only the sum at the end counts.
        if not found.choices or self._sequences == 1:
            self._take_usage(usage)
        return found.choices == [] and isinstance(found.usage, dict)

    def take_text(self, part: bytes) -> None:
        """A part of a stream that is no events."""
        self._text_bytes += len(part)

    def _output_known(self, found: _Answer) -> bool:
        """Whether an answer without text has a form that is known."""
        known = found.choices is not None or bool(bytes(found.data))
        return known or isinstance(found.text, str)  # a transcription without words

    def _take_units(self, found: _Answer) -> None:
        """Take what an answer says of images and seconds."""
        if self.images and (images := _length(found.data)) is not None:
            self.images = images
        duration: Any = found.duration
        if isinstance(found.usage, dict):
            duration = found.usage.get("seconds", duration)
        if self._route.content != "audio":
            return
        try:
            seconds = math.ceil(float(duration))
        except (TypeError, ValueError, OverflowError):
            return  # it names none
        if 0 <= seconds <= MOST_COUNT:
            self.seconds = seconds

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        prompt, output = _first(usage, _PROMPT), _first(usage, _OUTPUT)
        if prompt is None and output is None and self._route.charge == "prompt":
            prompt = _first(usage, ("total_tokens",))
        if not prompt and not output:
            return  # a server that counts nothing
        if prompt is not None:
            cached = sum(_first(usage, (name,)) or 0 for name in _ANTHROPIC_CACHE)
            self._prompt = min(MOST_COUNT, prompt + cached)
            self.cached = _first(usage, _ANTHROPIC_CACHE[:1]) or 0
        if output is not None:
            self._output = output
            self._text_bytes = self._events = 0  # it counts them
        for name in _CACHED:
            details = usage.get(name)
            if isinstance(details, dict):
                self.cached = _first(details, ("cached_tokens",)) or 0


def _read(data: bytes) -> _Answer | None:
    try:
        return msgspec.json.decode(data, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of the fields that is a count, which the ledger takes."""
    for name in names:
        value = fields.get(name)
        if type(value) is int and 0 <= value <= MOST_COUNT:
            return value
    return None


def _length(value: Raw) -> int | None:
    """Items of a list; None: it is none."""
    try:
        return len(msgspec.json.decode(value, type=list[Raw]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _repeats(found: _Answer) -> bool:
    """Whether an event shows again what earlier ones have."""
    kind = found.type
    return isinstance(kind, str) and kind.endswith((".done", ".completed"))


def _text_size(found: _Answer) -> int:
    """Bytes of the text in it."""
    if found.choices:
        return sum(
            _size_of(one.text) + _size_of(one.delta) + _size_of(one.message)
            for one in found.choices
        )
    parts = (found.delta, found.text, found.content, found.output)
    return sum(_size_of(one) for one in parts)


def _size_of(value: Any) -> int:
    """Bytes of text in a choice, a block, or a list of those."""
    match value:
        case str():
            return len(value.encode(errors="replace"))
        case list():
            return sum(_size_of(one) for one in value)
        case dict():
            calls = value.get("tool_calls") or value.get("function") or value.get("arguments")
            size = 0 if calls is None else len(msgspec.json.encode(calls))
            return size + sum(_size_of(value.get(name)) for name in _TEXTS)
    return 0
