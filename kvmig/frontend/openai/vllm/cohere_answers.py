"""Another thread makes Cohere's chats with many log-probabilities, and turns them into JSON.

vLLM makes them of a chat's answer, where the package `cohere` is installed. It does so in one go on
the loop, once the chat's answer is there.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.cohere import api_router as cohere_routes

from kvmig.frontend.openai.vllm.late_answers import answered_late, made_later
from kvmig.frontend.openai.vllm.logprob_counts import MANY
from kvmig.frontend.openai.vllm.spelling import SpeltResponse, spell_cohere


def cohere_beside() -> None:
    """Large chats are made on a thread from now on, where vLLM serves any. May be called again."""
    if not cohere_routes._SDK_AVAILABLE:
        return
    from vllm.entrypoints.cohere.serving import CohereServingChatV2 as Chats

    if hasattr(Chats.create_chat_v2, "__wrapped__"):
        return
    Chats._chat_completion_to_v2 = made_later(Chats._chat_completion_to_v2, _is_large)
    Chats.create_chat_v2 = answered_late(Chats.create_chat_v2, spell_cohere)
    cohere_routes.JSONResponse = SpeltResponse


def _is_large(chat: Any) -> bool:
    logprobs = chat.choices[0].logprobs
    return logprobs is not None and len(logprobs.content or ()) > MANY
