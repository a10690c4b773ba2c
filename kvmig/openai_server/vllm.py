"""vLLM's own OpenAI application, on an AsyncLLM that routes: implements `OpenAIServer`."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from vllm.config import VllmConfig

from kvmig.engines.vllm import flags
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.front import Outlet, RoutedLLM, apply_ready, decode_outputs
from kvmig.gateway.app import MIDDLEWARE
from kvmig.gateway.ports import Batch
from kvmig.gateway.router import Router
from kvmig.openai_server.vllm_app import ApiServer


class VllmServer:
    """Its request classes, tokenizer, detokenizer, stop strings, log-probabilities."""

    def __init__(
        self, argv: list[str], args: Namespace, sock: socket.socket, max_instances: int
    ) -> None:
        self.sink = Outlet()
        self._argv = argv
        self._args = args
        self._sock = sock
        self._max_instances = max_instances
        self._config: VllmConfig | None = None
        self._llm: RoutedLLM | None = None
        self._http: ApiServer | None = None

    def decode(self, payload: Sequence[memoryview]) -> Batch:
        outputs = decode_outputs(payload)
        return Batch(outputs.outputs, outputs)

    async def load(self) -> None:
        self._config = await asyncio.get_running_loop().run_in_executor(
            None, engine_config, flags.parse(self._argv)
        )

    def learn(self, ready: Sequence[bytes]) -> int:
        assert self._config is not None
        cache = self._config.cache_config
        cache.num_gpu_blocks = 0
        apply_ready(self._config, ready)
        tokens: int = cache.block_size
        return tokens

    async def start(self, router: Router, prepare: Callable[[FastAPI], None]) -> None:
        args = self._args
        self._llm = RoutedLLM(
            self._config,
            router,
            self.sink,
            self._max_instances,
            log_requests=args.enable_log_requests,
            log_stats=not args.disable_log_stats,
        )
        middleware = [f"{one.__module__}.{one.__name__}" for one in MIDDLEWARE]
        self._http = ApiServer(self._llm, args, self._sock, middleware, prepare)
        await self._http.start()

    async def ended(self) -> None:
        assert self._http is not None
        await self._http.ended()

    async def stop(self, grace_s: float) -> None:
        if self._http is not None:
            await self._http.stop(grace_s)
        if self._llm is not None:
            self._llm.shutdown()
