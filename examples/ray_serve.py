"""Ray Serve LLM whose streams move between its replicas.

Ray's replicas make an `AsyncLLM` each, whose engine core is one more process that nothing else
reaches. With `RAYLLM_VLLM_ENGINE_CLS=examples.ray_serve.JoinedEngine` in a deployment's
`runtime_env` a replica's engine is `vllm serve` with kvmig's plugin, on the replica's host and in
its place, which joins the scheduler that `KVMIG_JOIN` names (docs/plugin.md). Routing, replicas and
their number stay Ray's.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from ray.llm._internal.serve.core.configs.openai_api_models import (
    ChatCompletionResponse,
    CompletionResponse,
    ErrorInfo,
    ErrorResponse,
)
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine

SERVER = ("-m", "vllm.entrypoints.openai.api_server")
LOOK_S = 0.5
TIMEOUT_S = 600.0
"""Longest wait for the next byte of an answer."""
_PR_SET_PDEATHSIG = 1


def flags_of(engine_kwargs: Mapping[str, Any]) -> list[str]:
    """The flags of `vllm serve` for a deployment's `engine_kwargs`."""
    words = []
    for name, value in engine_kwargs.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict | list) else str(value)
            words.append(f"--{flag}={text}")
    return words


def end_with_parent() -> None:
    """In the child: SIGTERM when the replica is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class JoinedEngine(VLLMEngine):
    """The engine of one replica: a server of its own, to which its calls pass."""

    async def start(self) -> None:
        """Return once it serves. Raises RuntimeError if it has ended."""
        config = self.llm_config.get_engine_config()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [
            f"--model={config.actual_hf_model_id}", f"--served-model-name={config.model_id}",
            "--host=127.0.0.1", f"--port={port}", *flags_of(config.engine_kwargs),
        ]  # fmt: skip
        self._server = await asyncio.create_subprocess_exec(
            sys.executable, *SERVER, *words,
            env={**os.environ, "KVMIG": "1"}, preexec_fn=end_with_parent,
        )  # fmt: skip
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S)
        while not await self._serves():
            if self._server.returncode is not None:
                raise RuntimeError(f"its server has ended with {self._server.returncode}")
            await asyncio.sleep(LOOK_S)

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Pass a chat to the server."""
        async for part in self._relay("/v1/chat/completions", request, ChatCompletionResponse):
            yield part

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        """Pass a completion to the server."""
        async for part in self._relay("/v1/completions", request, CompletionResponse):
            yield part

    async def check_health(self) -> None:
        """Raises RuntimeError if the server doesn't serve."""
        if not await self._serves():
            raise RuntimeError("its server does not answer /health")

    async def shutdown(self) -> None:
        """End the server, once its streams have ended."""
        if self._server.returncode is None:
            self._server.terminate()
            await self._server.wait()
        await self._http.aclose()

    async def _serves(self) -> bool:
        try:
            return (await self._http.get("/health")).is_success
        except httpx.TransportError:
            return False

    async def _relay(self, path: str, request: Any, whole: Any) -> AsyncIterator[Any]:
        """The answer as Ray passes it on: events, one object, or an error."""
        body = request.model_dump(mode="json", exclude_unset=True)
        headers = {"x-request-id": request.request_id}
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            if not answer.is_success:
                error = json.loads(await answer.aread())["error"]
                yield ErrorResponse(error=ErrorInfo(**error))
            elif not request.stream:
                yield whole(**json.loads(await answer.aread()))
            else:
                async for line in answer.aiter_lines():
                    if line:
                        yield f"{line}\n\n"
