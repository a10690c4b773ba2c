"""vLLM's own OpenAI server application, with room for our routes and our way to stop."""

from __future__ import annotations

import copy
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

from kvmig.ground.http import KEEP_ALIVE_S
from kvmig.openai_server.http_task import HttpTask


class ApiServer(HttpTask):
    """The HTTP side of the front end: vLLM's app on `llm`, changed by `prepare`.

    middleware: import paths of ASGI classes, innermost first. prepare: sets
    app.state.connection, too, uvicorn's protocol.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        args: Namespace,
        sock: socket.socket,
        middleware: Sequence[str],
        prepare: Callable[[FastAPI], None],
    ) -> None:
        self._llm = llm
        self._args = args
        args.middleware = [*args.middleware, *middleware]
        self._prepare = prepare
        self._app: FastAPI | None = None
        super().__init__(sock, self._started)

    async def start(self) -> None:
        """Return once requests are taken. Raises StartupError."""
        args = self._args
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        self._prepare(app)
        self._app = app
        await self.run(self._serve(app))

    def _started(self) -> Any:
        """uvicorn's server, which vLLM puts there."""
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


def keep_alive_s() -> int:
    """Ours, unless vLLM's variable, whose default is 5 s, is set."""
    if not envs.is_set("VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        return KEEP_ALIVE_S
    theirs: int = envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE
    return theirs


def without_progress() -> dict[str, Any]:
    """Uvicorn's logging but for its words about its own start and end: those are ours to say."""
    config = copy.deepcopy(LOGGING_CONFIG)
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    return config
