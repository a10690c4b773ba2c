"""The OpenAI server of a front end, for each kind of engine."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fastapi import FastAPI

from kvmig.asgi.body_bounds import ModelReach
from kvmig.core.config import ClusterConfig
from kvmig.frontend.isolation import PromptSalts
from kvmig.frontend.media_rules import MediaRules
from kvmig.frontend.ports import OutputBatch, OutputSink
from kvmig.frontend.router import FrontendRouter


class OpenAIServer(Protocol):
    """Serves the API: `load`, `learn`, `make_app`, `serve`; then `stop`, also after a failure."""

    @property
    def sink(self) -> OutputSink:
        """The end of the router's streams."""
        ...

    def decode(self, payload: Sequence[memoryview]) -> OutputBatch:
        """See `kvmig.frontend.ports.OutputDecoder`."""
        ...

    def cut(self, item: Any, tokens: int) -> None:
        """Leave the first tokens of an item of `decode`, which then isn't its request's last."""
        ...

    async def load(self) -> None:
        """Read what needs no instance: the model's configuration, its tokenizer.

        Raises KvmigError.
        """
        ...

    def learn(self, ready: Sequence[bytes]) -> int:
        """Take over what instances found out at their start (`ServingEngine.describe`).

        Returns tokens a KV block.
        """
        ...

    def reach(self) -> ModelReach:
        """What the model can use of one prompt; after `make_app`."""
        ...

    async def make_app(self, router: FrontendRouter) -> FastAPI:
        """The OpenAI API's application, to be extended before it serves."""
        ...

    async def serve(self, app: FastAPI, own_signals: Callable[[], None]) -> None:
        """Serve with `app.state.connection`; return once calls are taken. Raises StartupError.

        own_signals: puts the process's signal handlers in place.
        """
        ...

    async def ended(self) -> None:
        """Wait until the server has stopped."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections get `grace_s` to end."""
        ...


def openai_server(
    config: ClusterConfig,
    argv: list[str],
    args: Namespace,
    sock: socket.socket,
    salts: PromptSalts | None,
) -> OpenAIServer:
    """Make the server for the cluster's engine, inside a running event loop.

    argv: the engine's flags; args: the same, parsed. salts: they keep users apart; None: nothing
    does.
    """
    if config.engine == "transformers":
        from kvmig.engines.transformers.tokenizer import ModelTokenizer
        from kvmig.frontend.openai.token_server import TokenServer

        return TokenServer(args, sock, lambda: ModelTokenizer(args.model, args.chat_template))
    if config.engine == "toy":
        from kvmig.engines.toy.kind import ByteTokenizer
        from kvmig.frontend.openai.token_server import TokenServer

        return TokenServer(args, sock, ByteTokenizer)
    from kvmig.frontend.openai.vllm.server import VllmServer

    rules = MediaRules(config.http.media_urls, args.allowed_media_domains or ())
    return VllmServer(
        argv,
        args,
        sock,
        config.lifecycle.max_instances,
        salts,
        rules,
        config.http.max_media,
        joins=config.join is not None,
    )
