"""vLLM's own OpenAI server application, with room for our routes and our way to stop."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.v1.engine.async_llm import AsyncLLM

from kvmig.ground.errors import StartupError

_START_TIMEOUT_S = 60.0


class ApiServer:
    """The HTTP side of the front end: vLLM's app on `llm`, changed by `prepare`.

    middleware: import paths of ASGI classes, innermost first. connection: uvicorn's protocol.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        args: Namespace,
        sock: socket.socket,
        middleware: Sequence[str],
        prepare: Callable[[FastAPI], None],
        connection: type[asyncio.Protocol],
    ) -> None:
        self._llm = llm
        self._args = args
        args.middleware = [*args.middleware, *middleware]
        self._sock = sock
        self._prepare = prepare
        self._connection = connection
        self._app: FastAPI | None = None
        self._serving: asyncio.Task[object] | None = None

    async def start(self) -> None:
        """Return once requests are taken. Raises StartupError."""
        args = self._args
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        self._prepare(app)
        self._app = app
        self._serving = asyncio.create_task(self._serve(app), name="http")
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not getattr(getattr(app.state, "server", None), "started", False):
            if self._serving.done():
                error = self._serving.exception()
                raise StartupError(f"the HTTP server did not start: {error}")
            if asyncio.get_running_loop().time() > deadline:
                raise StartupError(f"the HTTP server did not start in {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Wait until the server has stopped."""
        assert self._serving is not None
        await asyncio.wait([self._serving])

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections get `grace_s` to end."""
        if self._app is None or self._serving is None:
            self._sock.close()
            return
        server = getattr(self._app.state, "server", None)
        if server is not None:
            server.should_exit = True
        _, late = await asyncio.wait([self._serving], timeout=grace_s)
        if late and server is not None:
            # It then prints a traceback of its own cancellation.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            server.force_exit = True
            _, late = await asyncio.wait([self._serving], timeout=grace_s)
        if late:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        self._sock.close()

    async def _serve(self, app: FastAPI) -> object:
        args = self._args
        return await serve_http(
            app,
            sock=self._sock,
            http=self._connection,
            enable_ssl_refresh=args.enable_ssl_refresh,
            host=args.host,
            port=args.port,
            log_config=get_uvicorn_log_config(args) or without_progress(),
            # The default is in there already; naming it would bring the progress back.
            log_level=None if args.uvicorn_log_level == "info" else args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
        )


def without_progress() -> dict[str, Any]:
    """Uvicorn's logging but for its words about its own start and end: those are ours to say."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config
