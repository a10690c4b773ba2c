"""What a front end needs of the OpenAI server for its kind of engine."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import FastAPI

from kvmig.gateway.ports import Batch, Sink
from kvmig.gateway.router import Router
from kvmig.ground.config import ClusterConfig


class OpenAIServer(Protocol):
    """`load`, `learn`, `start`; then `stop`, also when `start` has failed."""

    @property
    def sink(self) -> Sink:
        """Where the router's streams end."""
        ...

    def decode(self, payload: Sequence[memoryview]) -> Batch:
        """See `kvmig.gateway.ports.Decode`."""
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

    async def start(self, router: Router, prepare: Callable[[FastAPI], None]) -> None:
        """Serve; return once requests are taken. Raises StartupError.

        prepare: adds what kvmig has beside the OpenAI API.
        """
        ...

    async def ended(self) -> None:
        """Wait until it has stopped."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections get `grace_s` to end."""
        ...


def openai_server(
    config: ClusterConfig, argv: list[str], args: Namespace, sock: socket.socket
) -> OpenAIServer:
    """For the cluster's engine. argv: its flags; args: parsed. Inside a running event loop."""
    if config.engine == "transformers":
        from kvmig.engines.transformers.tokenizer import Tokenizer
        from kvmig.openai_server.token_server import TokenServer

        return TokenServer(args, sock, lambda: Tokenizer(args.model, args.chat_template))
    if config.engine == "toy":
        from kvmig.engines.toy.kind import ByteTokenizer
        from kvmig.openai_server.token_server import TokenServer

        return TokenServer(args, sock, ByteTokenizer)
    from kvmig.openai_server.vllm import VllmServer

    return VllmServer(argv, args, sock, config.lifecycle.max_instances)
