"""The OpenAI server for engines that take tokens and give tokens: implements `OpenAIServer`.

They exchange `kvmig.engines.transformers.payload` with it.
"""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence

import msgspec
import uvicorn
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from kvmig.asgi.access import bearer
from kvmig.asgi.body_bounds import ModelReach
from kvmig.asgi.problems import as_problem
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.engines.transformers.payload import StepOutput
from kvmig.frontend.middleware import HttpMiddleware
from kvmig.frontend.openai.generation import (
    GenerationBackend,
    RequestQueues,
    TokenizerPort,
    decode_outputs,
)
from kvmig.frontend.openai.routes import openai_api
from kvmig.frontend.ports import OutputBatch
from kvmig.frontend.router import FrontendRouter


class DescribedEngine(msgspec.Struct):
    """The part of `ServingEngine.describe` that matters here."""

    block_tokens: int
    max_request_tokens: int


class TokenServer(HttpTask):
    """Serves completions, chats and /v1/models."""

    def __init__(
        self, args: Namespace, sock: socket.socket, tokenizer: Callable[[], TokenizerPort]
    ) -> None:
        """tokenizer: makes one, on a thread of its own."""
        super().__init__(sock, lambda: self._uvicorn)
        self.sink = RequestQueues()
        self._args = args
        self._make_tokenizer = tokenizer
        self._tokenizer: TokenizerPort | None = None
        self._max_tokens = 0
        self._uvicorn: uvicorn.Server | None = None

    def decode(self, payload: Sequence[memoryview]) -> OutputBatch:
        return decode_outputs(payload)

    def cut(self, item: StepOutput, tokens: int) -> None:
        item.token_ids = item.token_ids[:tokens]
        item.logprobs = item.logprobs[:tokens]
        item.finish_reason = ""

    async def load(self) -> None:
        self._tokenizer = await asyncio.to_thread(self._make_tokenizer)

    def learn(self, ready: Sequence[bytes]) -> int:
        assert self._tokenizer is not None
        engines = [msgspec.msgpack.decode(one, type=DescribedEngine) for one in ready]
        limits = [self._tokenizer.max_tokens, self._args.max_model_len]
        limits += [one.max_request_tokens for one in engines]
        self._max_tokens = min(one for one in limits if one)
        return engines[0].block_tokens

    def reach(self) -> ModelReach:
        assert self._tokenizer is not None
        return ModelReach(self._max_tokens, 4 * self._tokenizer.longest)

    async def make_app(self, router: FrontendRouter) -> FastAPI:
        assert self._tokenizer is not None
        args = self._args
        app = FastAPI(title="kvmig", docs_url=None, redoc_url=None)
        app.add_middleware(HttpMiddleware)
        app.add_exception_handler(HTTPException, as_problem)

        backend = GenerationBackend(router, self.sink, self._tokenizer)
        names = args.served_model_name or [args.model]
        app.include_router(openai_api(backend, names, self._max_tokens, bearer(args.api_key)))
        return app

    async def serve(self, app: FastAPI, own_signals: Callable[[], None]) -> None:
        access_log = not self._args.disable_uvicorn_access_log
        self._uvicorn = uvicorn_server(app, app.state.connection, access_log=access_log)
        await self.run(self._uvicorn.serve([self.sock]))
