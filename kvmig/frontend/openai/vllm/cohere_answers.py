"""Another thread makes Cohere's chats with many log-probabilities, and turns them into JSON.

vLLM makes them of a chat's answer, where the package `cohere` is installed. It does so in one go on
the loop, once the chat's answer is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from vllm.entrypoints.cohere import api_router as cohere_routes

from kvmig.frontend.openai.vllm.logprob_counts import MANY
from kvmig.frontend.openai.vllm.spelling import SpeltResponse, make_beside, spell_cohere

Answering = Callable[..., Coroutine[Any, Any, Any]]


class _LateChat(NamedTuple):
    """A chat that isn't made yet."""

    make: Callable[[], Any]


def cohere_beside() -> None:
    """Large chats are made on a thread from now on, where vLLM serves any. May be called again."""
    if not cohere_routes._SDK_AVAILABLE:
        return
    from vllm.entrypoints.cohere.serving import CohereServingChatV2

    if hasattr(CohereServingChatV2.create_chat_v2, "__wrapped__"):
        return
    CohereServingChatV2._chat_completion_to_v2 = _late(CohereServingChatV2._chat_completion_to_v2)
    CohereServingChatV2.create_chat_v2 = _made(CohereServingChatV2.create_chat_v2)
    cohere_routes.JSONResponse = SpeltResponse


def _late(make: Callable[..., Any]) -> Any:
    @functools.wraps(make)
    def made(self: Any, answer: Any, *args: Any, **options: Any) -> Any:
        late = _LateChat(functools.partial(make, self, answer, *args, **options))
        logprobs = answer.choices[0].logprobs
        many = logprobs is not None and len(logprobs.content or ()) > MANY
        return late if many else late.make()

    return made


def _made(create: Answering) -> Any:
    @functools.wraps(create)
    async def created(self: Any, *args: Any, **options: Any) -> Any:
        answer = await create(self, *args, **options)
        if not isinstance(answer, _LateChat):
            return answer
        return await make_beside(lambda: spell_cohere(answer.make()))

    return created
