"""vLLM's own HTTP application behind kvmig's middleware, in this process, over no engine at all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import msgspec
from fastapi import FastAPI
from vllm.v1.engine import EngineCoreOutput, EngineCoreReadyResponse, EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder

from kvmig.core.errors import Failure, NoInstance, QuotaUsedUp
from kvmig.engines.base import Frame
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.vllm import flags
from kvmig.frontend.call_aborts import CallAborts
from kvmig.frontend.openai.vllm.server import VllmServer
from kvmig.frontend.requests import is_tenants_call
from kvmig.frontend.router import FrontendRouter
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.http_states import behind_middleware
from tests.support.vllm_side import ENVIRONMENT

MODEL = "count"
End = Failure | Literal["own", "none", "quota at once"]
"""How a request ends: as the router's, with an exception of the front end's own, or before it
begins."""
READY = EngineCoreReadyResponse(
    max_model_len=1216, num_gpu_blocks=40, block_size=32, dp_stats_address=None, dtype="float32",
    vllm_version="", world_size=1, data_parallel_size=1, tensor_parallel_size=1,
    pipeline_parallel_size=1, decode_context_parallel_size=1, data_parallel_rank=0,
    max_num_seqs=4, max_num_batched_tokens=128, instance_id="", supports_lora=False, max_loras=0,
)  # fmt: skip


Put = Callable[[str, EngineCoreRequest], Sequence[EngineCoreOutput]]


class OneSequence:
    """What a router says of a call that has one sequence."""

    aborts: CallAborts

    def priority_of_call(self, asked: int) -> int:
        return asked

    def sequences_of_call(self) -> int:
        return 1

    def is_tenants_call(self) -> bool:
        return is_tenants_call()

    async def abort(self, request_ids: Sequence[str], complete: bool) -> None: ...


class AnsweringRouter(OneSequence):
    """In place of a router: each request gets the outputs that `put` makes for it."""

    def __init__(self, server: VllmServer, put: Put) -> None:
        self._server = server
        self._put = put

    async def submit(self, request: ClientRequest) -> None:
        decoded = MsgpackDecoder(EngineCoreRequest).decode(request.payload)
        outputs = self._put(request.request_id, decoded)
        asyncio.get_running_loop().call_soon(self._server.sink.deliver, 0, outputs, None)

    async def call(self, method: str, payload: Sequence[Frame]) -> Mapping[str, Sequence[Frame]]:
        raise NoInstance("it has no methods")


class EndingRouter(OneSequence):
    """In place of a router: each request gets two tokens, and ends in the same way."""

    def __init__(self, server: VllmServer, end: End, sentence: str) -> None:
        self._server = server
        self.end: End = end
        self.sentence = sentence
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, request: ClientRequest) -> None:
        if self.end == "none":
            raise NoInstance(self.sentence)
        if self.end == "quota at once":
            raise QuotaUsedUp(self.sentence)
        task = asyncio.create_task(self.answer(request.request_id))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def answer(self, request_id: str) -> None:
        sink = self._server.sink
        for token in (17, 18):
            await asyncio.sleep(0.01)
            sink.deliver(0, [EngineCoreOutput(request_id, [token])], None)
        await asyncio.sleep(0.01)
        if self.end == "own":
            sink.deliver(0, [EngineCoreOutput(request_id, cast("Any", None))], None)
        else:
            sink.fail([request_id], self.sentence, cast("Failure", self.end))

    async def call(self, method: str, payload: Sequence[Frame]) -> Mapping[str, Sequence[Frame]]:
        raise NoInstance(self.sentence)


@asynccontextmanager
async def application(
    *more: str,
    model: Path = BUNDLED,
    put: Put | None = None,
    task: str = "generate",
    aborts: CallAborts | None = None,
) -> AsyncIterator[tuple[FastAPI, EndingRouter]]:
    """The application, and what ends its requests. put: makes their outputs, in place of that.
    aborts: orders to end calls."""
    argv = [str(model), "--enforce-eager", f"--served-model-name={MODEL}", *more]
    with environment(ENVIRONMENT), socket.socket() as sock:
        flags.set_environment()
        server = VllmServer(argv, flags.parse(argv), sock, 1)
        await server.load()
    server.learn([msgspec.msgpack.encode((READY, (task,)))])
    router = EndingRouter(server, "retry", "")
    answering: OneSequence = router if put is None else AnsweringRouter(server, put)
    answering.aborts = aborts or CallAborts()
    app = await server.make_app(cast("FrontendRouter", answering))
    behind_middleware(app, added=True)
    try:
        yield app, router
    finally:
        await server.stop(0.0)


def client_of(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    """Calls the application without a socket."""
    transport = httpx.ASGITransport(app=cast("Any", app), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
