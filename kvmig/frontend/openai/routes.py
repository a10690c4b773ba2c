"""The OpenAI API over engines that take tokens and give tokens."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace
from starlette.responses import JSONResponse

from kvmig.asgi.access import Rule
from kvmig.asgi.call import current_call_id
from kvmig.asgi.errors import GatewayError
from kvmig.asgi.problems import PROBLEMS, guarded, shorten_value
from kvmig.engines.transformers.payload import SubmittedRequest
from kvmig.frontend.openai.answers import (
    EVENTS,
    AnswerWriter,
    ChatAnswer,
    ChatCompletion,
    Completion,
    CompletionAnswer,
    Models,
)
from kvmig.frontend.openai.bodies import ChatBody, CompletionBody, GenerationBody, field_names
from kvmig.frontend.openai.generation import (
    CallChoices,
    ChoiceGeneration,
    GenerationBackend,
    stream,
    whole,
)

USUAL_TOKENS = 16
"""Default max_tokens of a completion, as OpenAI has it."""


class BadRequest(GatewayError):
    """A field that can't be used."""

    status = HTTPStatus.BAD_REQUEST

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(GatewayError):
    """The call names another model."""

    status = HTTPStatus.NOT_FOUND
    param = "model"


def openai_api(
    backend: GenerationBackend, names: Sequence[str], max_tokens: int, rule: Rule
) -> APIRouter:
    """The routes under /v1. names: of the model; max_tokens: of a request, prompt and output.

    rule: who may call them.
    """
    runner = _Runner(backend, names, max_tokens)
    completions = APIRouter(route_class=guarded(rule, field_names(CompletionBody)))
    chats = APIRouter(route_class=guarded(rule, field_names(ChatBody)))
    api = APIRouter(prefix="/v1", route_class=guarded(rule, ()), responses=PROBLEMS)
    started = int(time.time())

    @completions.post("/completions", response_model=Completion, responses={200: EVENTS})
    async def complete(request: Request, body: CompletionBody) -> Response:
        """One prompt."""
        prompt = body.prompt
        if isinstance(prompt, str):
            runner.check_length("prompt", prompt)
            prompt = await asyncio.to_thread(backend.tokenizer.encode, prompt)
        call_id = current_call_id()
        asked = body.max_tokens or USUAL_TOKENS
        name, spell = body.model or names[0], backend.tokenizer.spell
        answer = CompletionAnswer(f"cmpl-{call_id}", name, body.n or 1, spell)
        submitted = runner.checked(body, prompt, asked, body.logprobs)
        return await runner.run(request, body, submitted, f"cmpl-{call_id}-0", answer)

    @chats.post("/chat/completions", response_model=ChatCompletion, responses={200: EVENTS})
    async def chat(request: Request, body: ChatBody) -> Response:
        """One conversation."""
        runner.check_length("messages", *(one.content for one in body.messages))
        messages = [one.as_template_has_it() for one in body.messages]
        try:
            prompt = await asyncio.to_thread(
                backend.tokenizer.encode_chat, messages, body.chat_template_kwargs
            )
        except ValueError as error:
            raise BadRequest("messages", str(error)) from error
        call_id = current_call_id()
        asked = body.max_completion_tokens or body.max_tokens
        if body.top_logprobs is not None and not body.logprobs:
            raise BadRequest("top_logprobs", "top_logprobs wants logprobs, which must be true")
        logprobs = body.top_logprobs or 0 if body.logprobs else None
        answer = ChatAnswer(f"chatcmpl-{call_id}", body.model or names[0], backend.tokenizer.spell)
        submitted = runner.checked(body, prompt, asked, logprobs)
        return await runner.run(request, body, submitted, f"chatcmpl-{call_id}", answer)

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


class _Runner:
    """Checks what a call asks for, and runs it."""

    def __init__(self, backend: GenerationBackend, names: Sequence[str], max_tokens: int) -> None:
        self._backend = backend
        self._names = names
        self._max_tokens = max_tokens

    def check_length(self, param: str, *texts: str) -> None:
        """Raises BadRequest for what can't be few enough tokens: to count them takes long."""
        length, most = sum(map(len, texts)), self._max_tokens * self._backend.tokenizer.longest
        if length > most:
            raise BadRequest(param, f"{param} has {length} characters, must have {most} or less")

    async def run(
        self,
        request: Request,
        body: GenerationBody,
        submitted: SubmittedRequest,
        external_id: str,
        answer: AnswerWriter,
    ) -> Response:
        """Raises GatewayError."""
        n, tokens = body.n or 1, len(submitted.prompt_token_ids)
        choices = CallChoices(
            [
                ChoiceGeneration(
                    self._backend,
                    external_id,
                    replace(submitted, seed=seed_of(submitted, choice)),
                    body.stop,
                    choice if n > 1 else None,
                    whole=not body.stream,
                )
                for choice in range(n)
            ]
        )
        if body.stream:
            return await stream(choices, answer, tokens, body.usage)
        return await whole(request, choices, answer, tokens)

    def checked(
        self, body: GenerationBody, prompt: list[int], asked: int | None, logprobs: int | None
    ) -> SubmittedRequest:
        """asked: output tokens; None: as many as there is room for. logprobs: see
        `SubmittedRequest`.

        Raises GatewayError.
        """
        if body.model and body.model not in self._names:
            names = " or ".join(self._names)
            raise UnknownModel(f"there is no model {shorten_value(body.model)}, only {names}")
        vocabulary = self._backend.tokenizer.vocabulary
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
                f"the prompt has {len(prompt)} tokens and max_tokens is {shorten_value(asked)},"
                f" together must be {self._max_tokens} or less",
            )
        temperature = 1.0 if body.temperature is None else body.temperature
        stops = {*(body.stop_token_ids or ())}
        if not body.ignore_eos:
            stops.update(self._backend.tokenizer.eos_ids)
        return SubmittedRequest(
            prompt_token_ids=prompt,
            max_tokens=asked or room,
            stop_token_ids=sorted(stops),
            temperature=temperature,
            # Drawn here, so that the request goes on the same when it runs again elsewhere.
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            logprobs=logprobs,
            priority=body.priority,
        )


def seed_of(submitted: SubmittedRequest, choice: int) -> int:
    """The seed of a choice, from the call's; in 64 bits with a sign."""
    assert submitted.seed is not None
    return (submitted.seed + choice + 2**63) % 2**64 - 2**63
