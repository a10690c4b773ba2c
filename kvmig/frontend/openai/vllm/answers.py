"""Threads make answers with many log-probabilities or choices, and turn them into JSON.

vLLM makes an answer of what its sequences have given, and JSON of that, in one go on the event
loop: thousands of log-probabilities hold up all streams. A thread makes such answers here, of all
APIs that have any. It makes large chunks of streams, too (`answer_chunks`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.openai.chat_completion import api_router as chat_routes
from vllm.entrypoints.openai.chat_completion import batch_serving
from vllm.entrypoints.openai.chat_completion.batch_serving import OpenAIServingChatBatch
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import api_router as completion_routes
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses import api_router as response_routes
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.scale_out.token_in_token_out import api_router as token_routes
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.outputs import RequestOutput
from vllm.utils.async_utils import merge_async_iterators

from kvmig.frontend.openai.body_threads import finish
from kvmig.frontend.openai.vllm.answer_chunks import chunks_beside, events_beside
from kvmig.frontend.openai.vllm.cohere_answers import cohere_beside
from kvmig.frontend.openai.vllm.late_answers import Making, answered_late, made_later
from kvmig.frontend.openai.vllm.logprob_counts import MANY, logprobs_in
from kvmig.frontend.openai.vllm.spelling import (
    SpeltResponse,
    make_beside,
    spell_choices,
    spell_response,
)

MANY_CHOICES = 64
"""Answers of one completion that are made on the event loop."""


class _Only:
    """The results of a sequence: the last one, which is there."""

    def __init__(self, final: RequestOutput | None) -> None:
        self.final = final

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        if self.final is not None:
            yield self.final


_made: ContextVar[tuple[object, Any] | None] = ContextVar("made", default=None)
"""Log-probabilities as the engine gave them, and what the present response has of them."""


def make_beside_loop() -> None:
    """Large answers are made on a thread from now on. May be called again."""
    chats, batches, completions = OpenAIServingChat, OpenAIServingChatBatch, OpenAIServingCompletion
    responses, tokens = OpenAIServingResponses, ServingTokens
    if hasattr(chats.chat_completion_full_generator, "__wrapped__"):
        return
    chats.chat_completion_full_generator = _collected(
        chats.chat_completion_full_generator, _chat_wants
    )
    tokens.serve_tokens_full_generator = _collected(
        tokens.serve_tokens_full_generator, _tokens_want
    )
    batches.chat_completion_full_generator_batch = _batch(
        batches.chat_completion_full_generator_batch
    )
    batch_serving.merge_async_iterators = _merged
    completions.request_output_to_completion_response = made_later(
        completions.request_output_to_completion_response, _is_large
    )
    completions.create_completion = answered_late(completions.create_completion, spell_choices)
    responses.responses_full_generator = _response(responses.responses_full_generator)
    responses._create_response_logprobs = _known(responses._create_response_logprobs)
    chunks_beside()
    events_beside()
    cohere_beside()
    for routes in (chat_routes, completion_routes, response_routes, token_routes):
        routes.JSONResponse = SpeltResponse


def _chat_wants(asked: Any) -> bool:
    return bool(asked.logprobs) or asked.prompt_logprobs is not None


def _tokens_want(asked: Any) -> bool:
    params = asked.sampling_params
    return params.logprobs is not None or params.prompt_logprobs is not None


def _collected(make: Making, wants: Callable[[Any], bool]) -> Any:
    """A chat, or `/inference/v1/generate`."""

    @functools.wraps(make)
    async def made(self: Any, asked: Any, results: Any, *args: Any, **options: Any) -> Any:
        if not wants(asked):
            return await make(self, asked, results, *args, **options)
        final: RequestOutput | None = None
        try:
            async for one in results:
                final = one
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        answer = make(self, asked, _Only(final), *args, **options)
        if final is None or logprobs_in([final]) <= MANY:
            return await answer
        return await make_beside(lambda: spell_choices(finish(answer)))

    return made


def _batch(make: Making) -> Any:
    """Several chats of one call."""

    @functools.wraps(make)
    async def made(self: Any, asked: Any, results: Sequence[Any], *args: Any, **more: Any) -> Any:
        if not asked.logprobs:
            return await make(self, asked, results, *args, **more)
        finals: list[RequestOutput | None] = [None] * len(results)
        try:
            async for number, one in merge_async_iterators(*results):
                finals[number] = one
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        answer = make(self, asked, [_Only(one) for one in finals], *args, **more)
        if logprobs_in([one for one in finals if one is not None]) <= MANY:
            return await answer
        return await make_beside(lambda: spell_choices(finish(answer)))

    return made


def _merged(*results: Any) -> Any:
    """vLLM's `merge_async_iterators`, without tasks for what is there already."""
    if not all(isinstance(one, _Only) for one in results):
        return merge_async_iterators(*results)
    return _numbered(results)


async def _numbered(results: Sequence[_Only]) -> AsyncIterator[tuple[int, RequestOutput]]:
    for number, one in enumerate(results):
        if one.final is not None:
            yield number, one.final


def _is_large(outputs: Sequence[RequestOutput]) -> bool:
    choices = sum(len(one.outputs) for one in outputs)
    return choices > MANY_CHOICES or logprobs_in(outputs) > MANY


def _response(make: Making) -> Any:
    """vLLM takes a lock to store a response, so the thread makes only what takes long of it."""

    @functools.wraps(make)
    async def made(
        self: Any, asked: Any, params: Any, results: Any, context: Any, model: str, tokenizer: Any,
        *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        if not (asked.is_include_output_logprobs() and isinstance(context, SimpleContext)):
            return await make(
                self, asked, params, results, context, model, tokenizer, *args, **options
            )
        prepared = _prepared(self, asked, results, context, tokenizer)
        try:
            answer = await make(
                self, asked, params, prepared, context, model, tokenizer, *args, **options
            )
            many = _made.get() is not None
        finally:
            _made.set(None)
        if not many or asked.stream or asked.background:
            return answer
        return await make_beside(lambda: spell_response(answer))

    return made


async def _prepared(
    self: Any, asked: Any, results: Any, context: SimpleContext, tokenizer: Any
) -> AsyncIterator[Any]:
    """The results, and after them the log-probabilities as the response will have them."""
    async for one in results:
        yield one
    last = context.final_output
    if last is None or context.streamed_output_items is not None or logprobs_in([last]) <= MANY:
        return
    final = last.outputs[0]
    _made.set((
        final.logprobs,
        await make_beside(lambda: self._create_response_logprobs(
            final.token_ids, final.logprobs, tokenizer, asked.top_logprobs
        )),
    ))  # fmt: skip


def _known(create: Callable[..., Any]) -> Any:
    @functools.wraps(create)
    def created(self: Any, token_ids: Any, logprobs: Any, *args: Any, **options: Any) -> Any:
        known = _made.get()
        if known is not None and known[0] is logprobs:
            return known[1]
        return create(self, token_ids, logprobs, *args, **options)

    return created
