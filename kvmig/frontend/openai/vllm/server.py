"""vLLM's own OpenAI application on an AsyncLLM that routes, with room for kvmig's routes."""

from __future__ import annotations

import asyncio
import copy
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence, Sized
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from uvicorn.config import LOGGING_CONFIG
from vllm import envs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.tasks import SupportedTask

from kvmig.asgi.body_bounds import TOKEN_BYTES, ModelReach
from kvmig.asgi.uvicorn_task import HttpTask
from kvmig.core.config import KEEP_ALIVE_S, HttpConfig
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.front import (
    OutputQueue,
    RoutedLLM,
    apply_described,
    cached_tokens,
    cut_output,
    decode_outputs,
    queue_times,
)
from kvmig.frontend.isolation import PromptSalts
from kvmig.frontend.media_rules import MediaRules
from kvmig.frontend.middleware import HttpMiddleware
from kvmig.frontend.openai.body_threads import check_beside_loop
from kvmig.frontend.openai.vllm.aborts import abort_everywhere
from kvmig.frontend.openai.vllm.answers import make_beside_loop
from kvmig.frontend.openai.vllm.background import end_background_responses
from kvmig.frontend.openai.vllm.beams import count_beams_as_one
from kvmig.frontend.openai.vllm.errors import note_failures
from kvmig.frontend.openai.vllm.first_error import stop_at_first_error
from kvmig.frontend.openai.vllm.media import load_media_by
from kvmig.frontend.openai.vllm.prompt_turns import take_turns
from kvmig.frontend.openai.vllm.recordings import count_recordings
from kvmig.frontend.ports import OutputBatch
from kvmig.frontend.router import FrontendRouter
from kvmig.frontend.stored_entries import StoredEntries

EVENT_BYTES = 2_048
"""Rough size of an event of a stored response, in bytes."""


class VllmServer(HttpTask):
    """Implements `OpenAIServer` with vLLM's request classes, tokenizer and output processor."""

    def __init__(
        self,
        argv: list[str],
        args: Namespace,
        sock: socket.socket,
        max_instances: int,
        salts: PromptSalts | None = None,
        media: MediaRules | None = None,
        max_media: int = HttpConfig().max_media,
        joins: bool = False,
    ) -> None:
        """joins: whether instances of other servers work for this one's clients, too."""
        super().__init__(sock, self._uvicorn)
        self.sink = OutputQueue(most=max_instances if joins else None)
        self._argv = argv
        self._args = args
        self._max_instances = max_instances + joins
        self._salts = salts
        self._media = media or MediaRules()
        self._max_media = max_media
        self._config: VllmConfig | None = None
        self._tasks: tuple[SupportedTask, ...] = ()
        self._llm: RoutedLLM | None = None
        self._app: FastAPI | None = None

    def cut(self, item: Any, tokens: int) -> None:
        cut_output(item, tokens)

    def decode(self, payload: Sequence[memoryview]) -> OutputBatch:
        outputs = decode_outputs(payload)
        cached = cached_tokens(outputs)
        queued = queue_times(outputs) if cached else {}
        return OutputBatch(outputs.outputs, outputs, cached, queued)

    async def load(self) -> None:
        self._config = await asyncio.get_running_loop().run_in_executor(
            None, engine_config, flags.parse(self._argv)
        )

    def learn(self, ready: Sequence[bytes]) -> int:
        assert self._config is not None
        cache = self._config.cache_config
        cache.num_gpu_blocks = 0
        self._tasks = apply_described(self._config, ready)
        tokens: int = cache.block_size
        return tokens

    def reach(self) -> ModelReach:
        assert self._llm is not None
        tokenizer, model = self._llm.renderer.tokenizer, self._llm.model_config
        longest = TOKEN_BYTES if tokenizer is None else 4 * tokenizer.max_chars_per_token
        return ModelReach(model.max_model_len, longest, model.is_multimodal_model)

    async def make_app(self, router: FrontendRouter) -> FastAPI:
        args = self._args
        count_beams_as_one()
        make_beside_loop()
        take_turns()
        self._llm = llm = RoutedLLM(
            self._config,
            router,
            self.sink,
            self._max_instances,
            self._tasks,
            self._salts,
            log_requests=args.enable_log_requests,
            log_stats=not args.disable_log_stats,
        )
        ours = f"{HttpMiddleware.__module__}.{HttpMiddleware.__name__}"
        args.middleware = [*args.middleware, ours]  # the last one is the outermost
        note_failures()
        load_media_by(self._media, self._max_media)
        app: FastAPI = build_app(args, self._tasks, llm.model_config)
        stop_at_first_error(app)
        check_beside_loop()
        let_pages_read_errors(app)
        await init_app_state(llm, app.state, args, self._tasks)
        abort_everywhere(app, llm, router.aborts)
        for task in ("transcription", "translation"):
            count_recordings(getattr(app.state, f"openai_serving_{task}", None))
        keep_responses_apart(getattr(app.state, "openai_serving_responses", None))
        return app

    async def serve(self, app: FastAPI, own_signals: Callable[[], None]) -> None:
        self._app = app
        await self.run(self._serve(app), own_signals)

    async def stop(self, grace_s: float) -> None:
        await super().stop(grace_s)
        if self._llm is not None:
            self._llm.shutdown()

    def _uvicorn(self) -> Any:
        """uvicorn's server, which vLLM puts into the application's state."""
        return None if self._app is None else getattr(self._app.state, "server", None)

    async def _serve(self, app: FastAPI) -> object:
        args = self._args
        return await serve_http(
            app,
            sock=self.sock,
            http=app.state.connection,
            enable_ssl_refresh=args.enable_ssl_refresh,
            host=args.host,
            port=args.port,
            log_config=get_uvicorn_log_config(args) or without_progress(),
            # The default is in there already; naming it would bring the progress back.
            log_level=None if args.uvicorn_log_level == "info" else args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=keep_alive_s(),
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
        )


def keep_responses_apart(responses: OpenAIServingResponses | None) -> None:
    """Let users read, go on from and cancel responses of their own only, where vLLM stores them,
    and keep no more of them than there is room for.

    None: the model generates nothing.
    """
    if responses is not None:
        responses.response_store = StoredEntries()
        responses.msg_store = StoredEntries()
        responses.event_store = StoredEntries(events_size, grows=True)
        end_background_responses(responses)


def events_size(kept: tuple[Sized, object]) -> int:
    """Bytes of the events of a stored response so far."""
    return EVENT_BYTES * (1 + len(kept[0]))


def let_pages_read_errors(app: FastAPI) -> None:
    """Put what lets web pages read answers (vLLM's --allowed-origins) outside of all else: our
    middleware's errors are answers, too.
    """
    pages: object = CORSMiddleware
    app.user_middleware.sort(key=lambda one: one.cls is not pages)
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built one already


def keep_alive_s() -> int:
    """Ours, unless vLLM's variable, whose default is 5 s, is set."""
    if not envs.is_set("VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        return KEEP_ALIVE_S
    theirs: int = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    return theirs


def without_progress() -> dict[str, Any]:
    """uvicorn's logging without the lines about its own start and end, which kvmig prints."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config
