"""A whole front end on one real llumlet whose engine only puts tokens out, all in this process."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from bench.load.pace import Metronome
from bench.load.stub import StubEngine
from bench.load.words import TransformersWords
from kvmig.asgi.access import access, bearer
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.controlplane.llumlet import Llumlet
from kvmig.core.config import ClusterConfig, HttpConfig, MigrationConfig
from kvmig.core.priorities import PriorityClass
from kvmig.frontend.app import extend
from kvmig.frontend.call_spans import CallSpans
from kvmig.frontend.launcher_link import InstanceMembership, LauncherLink
from kvmig.frontend.metrics import FrontendMetrics
from kvmig.frontend.middleware import HttpMiddleware, HttpState
from kvmig.frontend.openai.generation import GenerationBackend, RequestQueues, decode_outputs
from kvmig.frontend.openai.routes import openai_api
from kvmig.frontend.request_traces import RequestTraces
from kvmig.frontend.router import FrontendRouter
from kvmig.tracing.spans import SpanTracer
from tests.support.byte_tokens import Bytes

if TYPE_CHECKING:
    from kvmig.engines.transformers.tokenizer import ModelTokenizer

SECRET = b"s" * 32
SEND_BUFFER = 1 << 14
TIMEOUT_S = 60.0
TOKENS = 1 << 20
"""Of a request at most."""


@dataclass
class Stubbed:
    """What a test does with it. rate: tokens a second of each request; 0 at first."""

    port: int
    engine: StubEngine
    metronome: Metronome
    queues: RequestQueues
    router: FrontendRouter
    registry: CollectorRegistry

    def counted(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def client(self, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
        base = f"http://127.0.0.1:{self.port}"
        return httpx.AsyncClient(base_url=base, headers=headers, timeout=TIMEOUT_S)

    async def call(
        self, max_tokens: int, receive_bytes: int = 0, **fields: Any
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a streaming call. receive_bytes: that the kernel holds for the reader."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=max(receive_bytes, 1 << 16))
        body = json.dumps({"prompt": "a", "max_tokens": max_tokens, "stream": True, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n{body}".encode())
        return reader, writer


@asynccontextmanager
async def stubbed_front(
    http: HttpConfig,
    priorities: tuple[PriorityClass, ...] = ClusterConfig().priorities,
    api_keys: Sequence[str] = (),
    tracer: SpanTracer | None = None,
    admin_key: str = "",
) -> AsyncIterator[Stubbed]:
    """Started, and ended. tracer: makes spans; None: there are none."""
    small = MigrationConfig(staging_buffers=1, chunk_bytes=4096)
    config = ClusterConfig(migration=small, http=http, priorities=priorities)
    metronome, registry = Metronome(), CollectorRegistry()
    engine = StubEngine(TransformersWords(), metronome, 0.0)
    llumlet = Llumlet("i0", "test", SECRET, config, engine)
    await llumlet.start()
    metrics = FrontendMetrics(registry, priorities)
    queues = RequestQueues()
    traces = None if tracer is None else RequestTraces()
    router = FrontendRouter(
        "front", SECRET, config, queues, decode_outputs, observer=metrics, traces=traces
    )
    state = HttpState(
        http,
        access(api_keys, admin_key, "127.0.0.1"),
        priorities,
        registry,
        vacant=router.fleet.vacant,
        queued=router.fleet.waiting,
        overloaded=metrics.refused,
        traces=None if tracer is None else CallSpans(tracer, "bytes"),
    )
    membership = InstanceMembership(router)
    launcher = LauncherLink("tcp://127.0.0.1:9", SECRET, "front", membership.apply_news)
    await router.add_instance("i0", llumlet.endpoint)
    app = FastAPI()
    app.add_middleware(HttpMiddleware)
    backend = GenerationBackend(router, queues, cast("ModelTokenizer", Bytes(TOKENS)))
    # As in a real front end, the engine's own look at keys, which comes later, knows both.
    keys = [*api_keys, admin_key] if api_keys and admin_key else api_keys
    app.include_router(openai_api(backend, ["bytes"], TOKENS, bearer(keys)))
    extend(app, state, router, membership, launcher, "bytes", admin_key=admin_key)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    server = uvicorn_server(app, app.state.connection, access_log=False)
    task = HttpTask(sock, lambda: server)
    await task.run(server.serve([sock]))
    try:
        yield Stubbed(sock.getsockname()[1], engine, metronome, queues, router, registry)
    finally:
        router.give_up("the test is over")
        await task.stop(2.0)
        await launcher.close()
        await membership.close()
        await router.close()
        await llumlet.close(2.0)
