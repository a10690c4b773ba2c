"""The door for work: calls that come while too many wait are answered 429."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from kvmig.gateway.admin_errors import problem
from kvmig.gateway.caller import current_caller
from kvmig.gateway.overload import Overload
from kvmig.gateway.priorities import PRIORITY
from kvmig.ground.clock import Clock, monotonic

WORK = frozenset(
    {
        "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch",
        "/v1/responses", "/v1/messages", "/inference/v1/generate", "/invocations",
        "/cohere/v2/chat", "/generative_scoring", "/v1/audio/transcriptions",
        "/v1/audio/translations", "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
        "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    }
)  # fmt: skip
"""Paths whose calls engines work for, of vLLM's application and our own."""


@dataclass
class Door:
    """`app.state.door`. in_queues: see `Overload.refusal`; refused: told the priority."""

    overload: Overload
    in_queues: Callable[[int], int] = lambda priority: 0
    refused: Callable[[int], None] = lambda priority: None
    clock: Clock = monotonic


class OverloadMiddleware:
    """Pure ASGI, behind whatever checks the call: 429 with OpenAI's error shape and Retry-After."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        caller = current_caller.get()
        if caller is None or scope["type"] != "http" or path not in WORK:
            await self.app(scope, receive, send)
            return
        door: Door = scope["app"].state.door
        overload, priority = door.overload, scope.get(PRIORITY, 0)
        refusal = overload.refusal(priority, door.in_queues(priority), door.clock())
        if refusal is not None:
            door.refused(priority)
            sentence = (
                f"{refusal.waiting} requests wait for their first token, allowed are"
                f" {overload.limit} (--max-waiting): try again in {refusal.retry_after_s} s"
            )
            headers = {"Retry-After": str(refusal.retry_after_s)}
            answer = problem(HTTPStatus.TOO_MANY_REQUESTS, sentence, headers=headers)
            await answer(scope, receive, send)
            return
        caller.enter(lambda change: overload.hold(priority, change, door.clock()))
        try:
            await self.app(scope, receive, send)
        finally:
            caller.leave()
