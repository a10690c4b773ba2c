"""Answers with many log-probabilities are put together, and spelt, beside the event loop.

Where nothing streams, vLLM makes an answer of what its sequences have given, and JSON of that, in
one go on the event loop: thousands of log-probabilities hold up all streams. Such answers are made
on a thread here, and their JSON in pieces.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import JSONResponse
from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import RequestOutput

from kvmig.frontend.openai.body_threads import finish

MANY = 512
"""Log-probabilities of an answer that is made on the event loop: some 5 ms."""
PIECE = 64
"""Positions that are spelt at a time."""
_POOL = ThreadPoolExecutor(1, thread_name_prefix="answers")

T = TypeVar("T")


class SerializedAnswer(NamedTuple):
    """An answer as JSON, in place of what JSON is made of."""

    text: bytes


class SpeltResponse(JSONResponse):
    """A response that may have its text already."""

    def render(self, content: Any) -> bytes:
        return content.text if isinstance(content, SerializedAnswer) else super().render(content)


class _Late(NamedTuple):
    """A completion's answer that isn't made yet."""

    make: Callable[[], Any]


def make_beside_loop() -> None:
    """Make large answers beside the loop from now on. May be called again."""
    chats, completions = OpenAIServingChat, OpenAIServingCompletion
    if hasattr(chats.chat_completion_full_generator, "__wrapped__"):
        return
    chats.chat_completion_full_generator = _chat(chats.chat_completion_full_generator)
    completions.request_output_to_completion_response = _later(
        completions.request_output_to_completion_response
    )
    completions.create_completion = _completion(completions.create_completion)
    chat_routes.JSONResponse = completion_routes.JSONResponse = SpeltResponse


def logprobs_in(outputs: Sequence[RequestOutput]) -> int:
    """Log-probabilities of an answer, roughly."""
    lists = [one.prompt_logprobs for one in outputs]
    lists += [answer.logprobs for one in outputs for answer in one.outputs]
    return sum(len(one) * len(one[-1] or ()) for one in lists if one)


def _chat(make: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    @functools.wraps(make)
    async def made(self: Any, asked: Any, results: Any, *args: Any, **options: Any) -> Any:
        if not (asked.logprobs or asked.prompt_logprobs is not None):
            return await make(self, asked, results, *args, **options)
        final: RequestOutput | None = None
        try:
            async for one in results:
                final = one
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        answer = make(self, asked, _only(final), *args, **options)
        if final is None or logprobs_in([final]) <= MANY:
            return await answer
        return await _beside(lambda: _spell(finish(answer)))

    return made


def _later(make: Callable[..., Any]) -> Any:
    @functools.wraps(make)
    def made(self: Any, outputs: Sequence[RequestOutput], *args: Any, **options: Any) -> Any:
        late = _Late(functools.partial(make, self, outputs, *args, **options))
        return late if logprobs_in(outputs) > MANY else late.make()

    return made


def _completion(create: Callable[..., Coroutine[Any, Any, Any]]) -> Any:
    @functools.wraps(create)
    async def created(self: Any, *args: Any, **options: Any) -> Any:
        answer = await create(self, *args, **options)
        if not isinstance(answer, _Late):
            return answer
        return await _beside(lambda: _spell(answer.make()))

    return created


async def _only(final: RequestOutput | None) -> AsyncIterator[RequestOutput]:
    if final is not None:
        yield final


async def _beside(make: Callable[[], T]) -> T:
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_POOL, context.run, make)


# -- JSON, in pieces: others get the interpreter between two of them


def _spell(answer: Any) -> Any:
    """The answer, which has its own JSON ready."""
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
    rest = to_json(whole)
    pieces: list[bytes] = []
    for number, (_, _, value) in enumerate(parts):
        before, _, rest = rest.partition(f'"{mark}{number}."'.encode())
        pieces += [before, *_pieces(value)]
    spelt = SerializedAnswer(b"".join([*pieces, rest]))
    answer.__dict__["model_dump"] = lambda: spelt
    return answer


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
