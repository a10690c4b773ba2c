"""JSON of answers with many log-probabilities, made in pieces on the thread `BESIDE`.

A single call of pydantic holds the interpreter until all of an answer is JSON; between two pieces
the event loop goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import JSONResponse

PIECE = 64
"""Positions that are spelt at a time."""
BESIDE = ThreadPoolExecutor(1, thread_name_prefix="answers")

T = TypeVar("T")
_PARTS = ("response", "item", "part", "output", "content")
"""Fields of a response, and of its stream's events, that lead to log-probabilities."""


class SerializedAnswer(NamedTuple):
    """An answer as JSON, in place of what JSON is made of."""

    text: bytes


class SpeltResponse(JSONResponse):
    """A response that may have its text already."""

    def render(self, content: Any) -> bytes:
        return content.text if isinstance(content, SerializedAnswer) else super().render(content)


async def make_beside(make: Callable[[], T]) -> T:
    """What `make` returns, which runs on the thread."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(BESIDE, context.run, make)


def spell_choices(answer: Any) -> Any:
    """A chat's or a completion's answer, which has its own JSON ready."""
    if not hasattr(answer, "choices"):
        return answer  # an error
    parts: list[tuple[dict[str, Any], str, Any]] = []
    whole = answer.model_dump(
        exclude={"prompt_logprobs": True, "choices": {"__all__": {"logprobs", "prompt_logprobs"}}}
    )
    # In the order in which they come: what is put in stands last in its object.
    pairs = [*zip(whole["choices"], answer.choices, strict=True), (whole, answer)]
    for made, of in pairs:
        names = [one for one in ("logprobs", "prompt_logprobs") if one in type(of).model_fields]
        parts += [(made, one, getattr(of, one)) for one in names]
    mark = secrets.token_hex(16)
    for number, (made, name, _) in enumerate(parts):
        made[name] = f"{mark}{number}."
    values = [value for *_, value in parts]
    marks = [f'"{mark}{number}."'.encode() for number in range(len(parts))]
    return _with_text(answer, _joined(to_json(whole), marks, values))


def spell_response(answer: Any) -> Any:
    """A copy of a response, which has its own JSON ready: vLLM may keep the response itself."""
    return _with_text(answer.model_copy(), spell_event(answer))


def spell_cohere(answer: Any) -> Any:
    """A chat of Cohere's, which has its own JSON ready: without what is None, as vLLM has it."""
    mark = secrets.token_hex(16)
    whole = {**answer.model_dump(exclude={"logprobs"}, exclude_none=True), "logprobs": mark}
    return _with_text(answer, _joined(to_json(whole), [f'"{mark}"'.encode()], [answer.logprobs]))


def spell_event(event: BaseModel) -> bytes:
    """JSON of a response, or of an event of its stream."""
    mark, held = secrets.token_hex(16), list[list[Any]]()
    whole = _without_logprobs(event, mark, held).model_dump_json(by_alias=True).encode()
    marks = [to_json([_marked(one, mark, number)]) for number, one in enumerate(held)]
    return _joined(whole, marks, held)


def logprobs_of_event(event: object) -> int:
    """Log-probabilities in a response, or in an event of its stream, roughly."""
    return sum(len(one) * (1 + len(one[-1].top_logprobs or ())) for one in _logprobs_in(event))


def _with_text(answer: Any, text: bytes) -> Any:
    spelt = SerializedAnswer(text)
    answer.__dict__["model_dump"] = lambda **_: spelt
    return answer


def _logprobs_in(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, list):
        for one in value:
            yield from _logprobs_in(one)
    elif isinstance(value, BaseModel):
        for name in _PARTS:
            yield from _logprobs_in(getattr(value, name, None))
        if isinstance(logprobs := getattr(value, "logprobs", None), list) and logprobs:
            yield logprobs


def _without_logprobs(value: Any, mark: str, held: list[list[Any]]) -> Any:
    """A copy with marks in the place of log-probabilities, which are put into `held`."""
    if isinstance(value, list):
        return [_without_logprobs(one, mark, held) for one in value]
    if not isinstance(value, BaseModel):
        return value
    changed: dict[str, Any] = {}
    for name in _PARTS:
        if (inner := getattr(value, name, None)) is not None:
            changed[name] = _without_logprobs(inner, mark, held)
    if isinstance(logprobs := getattr(value, "logprobs", None), list) and logprobs:
        changed["logprobs"] = [_marked(logprobs, mark, len(held))]
        held.append(logprobs)
    return value.model_copy(update=changed)


def _marked(logprobs: list[Any], mark: str, number: int) -> Any:
    """A log-probability whose JSON differs from that of all others."""
    return logprobs[0].model_copy(update={"token": f"{mark}{number}.", "top_logprobs": []})


def _joined(whole: bytes, marks: list[bytes], values: list[Any]) -> bytes:
    pieces, rest = list[bytes](), whole
    for mark, value in zip(marks, values, strict=True):
        before, _, rest = rest.partition(mark)
        pieces += [before, *_pieces(value)]
    return b"".join([*pieces, rest])


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        for number, name in enumerate(type(value).model_fields):
            yield b"," if number else b"{"
            yield to_json(name) + b":"
            yield from _pieces(getattr(value, name))
        yield b"}"
    elif isinstance(value, list):
        yield b"["
        for at in range(0, len(value), PIECE):
            yield (b"," if at else b"") + to_json(value[at : at + PIECE])[1:-1]
        yield b"]"
    else:
        yield to_json(value)
