"""The OpenAI API over engines that take tokens and give tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from kvmig.engines.transformers.payload import Submitted
from kvmig.gateway.access import Rule
from kvmig.gateway.admin_errors import PROBLEMS, guarded
from kvmig.gateway.request_id import current_call
from kvmig.gateway.shown import shown
from kvmig.openai_server import calls
from kvmig.openai_server.answers import Answer, ChatAnswer, CompletionAnswer
from kvmig.openai_server.bodies import Body, ChatBody, CompletionBody, field_names
from kvmig.openai_server.documented import EVENTS, ChatCompletion, Completion, Models
from kvmig.openai_server.errors import BadRequest, UnknownModel
from kvmig.openai_server.generation import Engines, Generation

USUAL_TOKENS = 16
"""Of a completion that says nothing of its length, as OpenAI has it."""


def openai_api(engines: Engines, names: Sequence[str], max_tokens: int, rule: Rule) -> APIRouter:
    """The routes under /v1. names: of the model; max_tokens: of a request, prompt and output.

    rule: who may call them.
    """
    door = _Door(engines, names, max_tokens)
    completions = APIRouter(route_class=guarded(rule, field_names(CompletionBody)))
    chats = APIRouter(route_class=guarded(rule, field_names(ChatBody)))
    api = APIRouter(prefix="/v1", route_class=guarded(rule, ()), responses=PROBLEMS)
    started = int(time.time())

    @completions.post("/completions", response_model=Completion, responses={200: EVENTS})
    async def complete(request: Request, body: CompletionBody) -> Response:
        """One prompt, one choice."""
        prompt = body.prompt
        if isinstance(prompt, str):
            door.check_length("prompt", prompt)
            prompt = await asyncio.to_thread(engines.tokenizer.encode, prompt)
        call_id = current_call.get()
        asked = body.max_tokens or USUAL_TOKENS
        answer = CompletionAnswer(f"cmpl-{call_id}", body.model or names[0])
        return await door.run(request, body, prompt, asked, f"cmpl-{call_id}-0", answer)

    @chats.post("/chat/completions", response_model=ChatCompletion, responses={200: EVENTS})
    async def chat(request: Request, body: ChatBody) -> Response:
        """One choice."""
        door.check_length("messages", *(one.content for one in body.messages))
        messages = [one.model_dump(exclude_none=True) for one in body.messages]
        try:
            prompt = await asyncio.to_thread(
                engines.tokenizer.encode_chat, messages, body.chat_template_kwargs
            )
        except ValueError as error:
            raise BadRequest("messages", str(error)) from error
        call_id = current_call.get()
        asked = body.max_completion_tokens or body.max_tokens
        answer = ChatAnswer(f"chatcmpl-{call_id}", body.model or names[0])
        return await door.run(request, body, prompt, asked, f"chatcmpl-{call_id}", answer)

    @api.get("/models", response_model=Models)
    async def models() -> Response:
        """One model, under all its names."""
        rows: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": started,
                "owned_by": "kvmig",
                "root": names[0],
                "max_model_len": max_tokens,
            }
            for name in names
        ]
        return JSONResponse({"object": "list", "data": rows})

    api.include_router(completions)
    api.include_router(chats)
    return api


class _Door:
    """Checks what is asked for, and begins it."""

    def __init__(self, engines: Engines, names: Sequence[str], max_tokens: int) -> None:
        self._engines = engines
        self._names = names
        self._max_tokens = max_tokens

    def check_length(self, param: str, *texts: str) -> None:
        """Raises BadRequest for what can't be few enough tokens: to count them takes long."""
        length, most = sum(map(len, texts)), self._max_tokens * self._engines.tokenizer.longest
        if length > most:
            raise BadRequest(param, f"{param} has {length} characters, must have {most} or less")

    async def run(
        self,
        request: Request,
        body: Body,
        prompt: list[int],
        asked: int | None,
        external_id: str,
        answer: Answer,
    ) -> Response:
        """asked: output tokens; None: as many as there is room for. Raises GatewayError."""
        submitted = self._checked(body, prompt, asked)
        generation = Generation(self._engines, external_id, submitted, body.stop)
        if body.stream:
            return await calls.stream(generation, answer, len(prompt), body.usage)
        return await calls.whole(request, generation, answer, len(prompt))

    def _checked(self, body: Body, prompt: list[int], asked: int | None) -> Submitted:
        if body.model and body.model not in self._names:
            names = " or ".join(self._names)
            raise UnknownModel(f"there is no model {shown(body.model)}, only {names}")
        vocabulary = self._engines.tokenizer.vocabulary
        if not prompt:
            raise BadRequest("prompt", "the prompt has no token, must have one or more")
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise BadRequest(
                "prompt", f"prompt has token ids that are not in 0 to {vocabulary - 1}"
            )
        room = self._max_tokens - len(prompt)
        if room < (asked or 1):
            raise BadRequest(
                "max_tokens" if room > 0 else "prompt",
                f"the prompt has {len(prompt)} tokens and max_tokens is {shown(asked)},"
                f" together must be {self._max_tokens} or less",
            )
        temperature = 1.0 if body.temperature is None else body.temperature
        stops = {*(body.stop_token_ids or ())}
        if not body.ignore_eos:
            stops.update(self._engines.tokenizer.eos_ids)
        return Submitted(
            prompt_token_ids=prompt,
            max_tokens=asked or room,
            stop_token_ids=sorted(stops),
            temperature=temperature,
            # Drawn here, so that the request goes on the same when it runs again elsewhere.
            seed=secrets.randbits(63) if body.seed is None else body.seed,
        )
