"""Beam searches of vLLM's application, which are many requests of its engine, as one answer each.

The application runs each step of each beam as a request with an id of its own and a prompt that is
longer by one token. Their ids don't say for sure what they are, since clients choose a part of
them; the task in which they are made does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.entrypoints.generate.beam_search import online
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams

from kvmig.frontend.openai.vllm.shared_beams import SharedBeam
from kvmig.frontend.requests import BeamSearch, current_search

Search = Callable[..., AsyncGenerator[RequestOutput, None]]


def count_beams_as_one() -> None:
    """Let requests of a beam search know their search, and beams share what they have in common.
    May be called again."""
    online.BeamSearchSequence = SharedBeam
    found = BeamSearchOnlineMixin.beam_search
    if not hasattr(found, "__wrapped__"):
        BeamSearchOnlineMixin.beam_search = as_one(found)


def as_one(search: Search) -> Search:
    """A search whose steps, in whichever task they run, have it in their context."""

    @functools.wraps(search)
    async def searched(
        self: Any,
        prompt: Any,
        request_id: str,
        params: BeamSearchParams,
        *args: Any,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        found = BeamSearch(params.beam_width)
        token = current_search.set(found)
        try:
            # All of it before the first `yield`, after which another task may go on with this.
            steps = search(self, prompt, request_id, params, *args, **options)
            async with contextlib.aclosing(steps):
                outputs = [one async for one in steps]
        finally:
            current_search.reset(token)
        for one in outputs:
            for answer in one.outputs:
                if answer.logprobs is not None:
                    answer.logprobs = list(answer.logprobs)
            tokens = sum(len(answer.token_ids) for answer in one.outputs)
            found.finish(len(one.prompt_token_ids or ()), tokens)
            yield one

    return searched
