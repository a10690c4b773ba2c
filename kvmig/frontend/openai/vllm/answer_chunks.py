"""Chunks of streams that have many log-probabilities are made on a thread.

A chunk is large where a completion's first one repeats the prompt (`echo`), and where a client read
nothing for a while: vLLM then makes one chunk of all that has come since. vLLM's makers of chunks
wait for nothing except results, so each step of them can be made on a thread.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.outputs import RequestOutput

from kvmig.frontend.openai.vllm.logprob_counts import MANY, logprobs_in
from kvmig.frontend.openai.vllm.spelling import logprobs_of_event, make_beside, spell_event

Chunks = types.AsyncGeneratorType[Any, None]
"""What vLLM's functions return."""


class _ResultFeed:
    """Results for a maker of chunks, which waits in a way that only `ChunkSteps` sees."""

    def __init__(self) -> None:
        self.results: deque[Any] = deque()
        """An exception among them is raised; None ends them."""

    def __aiter__(self) -> _ResultFeed:
        return self

    async def __anext__(self) -> Any:
        while not self.results:
            await _pause()
        result = self.results.popleft()
        if isinstance(result, BaseException):
            raise result
        if result is None:
            raise StopAsyncIteration
        return result


@types.coroutine
def _pause() -> Generator[None, None, None]:
    yield


class ChunkSteps:
    """Makes chunks of results, a step at a time, on any thread; `close` is for the event loop's."""

    def __init__(self, make: Callable[[AsyncIterator[Any]], Chunks]) -> None:
        self._feed = _ResultFeed()
        self._chunks = make(self._feed)
        self._step: Any = None
        """The step that waits for a result."""
        self._lock = threading.Lock()
        """Has what `close` and a step on a thread both look at: the next two."""
        self._steps = False
        """Whether a step is being made."""
        self._closed = False

    def feed(self, result: Any) -> None:
        """A result; an exception in its place; or None: there are no more."""
        self._feed.results.append(result)

    def make_next(self) -> Any:
        """The next chunk; None if it takes another result. Raises StopAsyncIteration at the end."""
        with self._lock:
            if self._closed:
                raise StopAsyncIteration
            self._steps = True
        try:
            return self._make_step()
        finally:
            with self._lock:
                self._steps = False
                left = self._closed
            if left:  # its client has left meanwhile
                self._end()

    def _make_step(self) -> Any:
        step, self._step = self._step or self._chunks.__anext__(), None
        try:
            waits_for = step.send(None)
        except StopIteration as made:
            return made.value
        if waits_for is not None:
            raise RuntimeError("it waits for something else than results")
        self._step = step
        return None

    def close(self) -> None:
        """Let the maker end; one that makes a step on a thread ends after it."""
        with self._lock:
            self._closed = True
            if self._steps:
                return
        self._end()

    def _end(self) -> None:
        """A maker that waits for a result must be ended by way of its step: it counts as running,
        and can't be closed."""
        step, self._step = self._step, None
        try:
            if step is None:
                self._chunks.aclose().send(None)
            else:
                step.throw(GeneratorExit)
        except (StopIteration, StopAsyncIteration, GeneratorExit):
            if self._chunks.ag_frame is None:
                return
        raise RuntimeError("it goes on at its end")


async def made_chunks(
    make: Callable[[AsyncIterator[Any]], Chunks],
    results: AsyncGenerator[Any, None],
    size: Callable[[Any], int],
) -> AsyncGenerator[Any, None]:
    """The chunks of results. size: of a result, in log-probabilities."""
    steps = ChunkSteps(make)
    try:
        async with aclosing(results):
            ended = False
            while not ended:
                many = False
                try:
                    result = await anext(results)
                    many = size(result) > MANY
                except StopAsyncIteration:
                    result, ended = None, True
                except Exception as error:  # noqa: BLE001 - vLLM's maker answers it
                    result, ended = error, True
                steps.feed(result)
                while (chunk := await _next_chunk(steps, many)) is not None:
                    yield chunk
    finally:
        steps.close()


async def _next_chunk(steps: ChunkSteps, many: bool) -> Any:
    def make() -> Any:
        try:
            return steps.make_next()
        except StopAsyncIteration:
            return None

    return await make_beside(make) if many else make()


def chunks_beside() -> None:
    """Large chunks are made on a thread from now on."""
    for kind, name, at, wants, size in (
        (OpenAIServingChat, "chat_completion_stream_generator", 1, _logprobs, _of_result),
        (OpenAIServingCompletion, "completion_stream_generator", 2, _logprobs, _of_numbered),
        (ServingTokens, "serve_tokens_stream_generator", 1, _token_logprobs, _of_result),
        (
            OpenAIServingResponses, "_process_simple_streaming_events", 2, _response_logprobs,
            _of_context,
        ),
    ):  # fmt: skip
        setattr(kind, name, _beside(getattr(kind, name), at, wants, size))


def events_beside() -> None:
    """Large events of responses' streams become JSON on a thread from now on."""
    response_routes._convert_stream_to_sse_events = _spelt_events


def _beside(
    make: Callable[..., Chunks],
    at: int,
    wants: Callable[[Any], bool],
    size: Callable[[Any], int],
) -> Any:
    """at: the place of the results among the arguments, after the request."""

    @functools.wraps(make)
    def made(self: Any, asked: Any, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        if not wants(asked):
            return make(self, asked, *args, **options)
        before, results, after = args[: at - 1], args[at - 1], args[at:]
        return made_chunks(
            lambda fed: make(self, asked, *before, fed, *after, **options), results, size
        )

    return made


def _logprobs(asked: Any) -> bool:
    return bool(asked.logprobs) or asked.logprobs == 0


def _token_logprobs(asked: Any) -> bool:
    return asked.sampling_params.logprobs is not None


def _response_logprobs(asked: Any) -> bool:
    wanted: bool = asked.is_include_output_logprobs()
    return wanted


def _of_result(result: RequestOutput) -> int:
    return logprobs_in([result])


def _of_numbered(result: tuple[int, RequestOutput]) -> int:
    return logprobs_in([result[1]])


def _of_context(context: SimpleContext) -> int:
    return 0 if context.last_output is None else logprobs_in([context.last_output])


async def _spelt_events(events: Chunks) -> AsyncGenerator[str, None]:
    """The JSON is vLLM's."""
    async for event in events:
        if logprobs_of_event(event) > MANY:
            text = (await make_beside(functools.partial(spell_event, event))).decode()
        else:
            text = event.model_dump_json(indent=None, by_alias=True)
        yield f"event: {getattr(event, 'type', 'unknown')}\ndata: {text}\n\n"
