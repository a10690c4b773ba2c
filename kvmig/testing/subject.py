"""What the suite needs of an engine besides the port: requests, and what came out."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Protocol

from kvmig.core.errors import ConfigError
from kvmig.engines.base import Frame, Frames, ServingEngine


class GeneratedTokens(Protocol):
    """What one step gave one request."""

    @property
    def request_id(self) -> str: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def finish_reason(self) -> str:
        """Empty while it runs."""
        ...


class EngineUnderTest(ServingEngine, Protocol):
    """A serving engine that also encodes a plain request and decodes its outputs.

    Any token id below 128 must be one of its vocabulary, and a request of 26 blocks must fit. Two
    engines of one factory must be alike: the same model, the same block size.
    """

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """A payload for `submit`, of a request that only `max_tokens` ends; greedy without seed.

        Raises NotImplementedError if the engine can't sample with a seed.
        """
        ...

    def decode_outputs(self, frames: Frames) -> Sequence[GeneratedTokens]:
        """What `connect`'s `on_outputs` got."""
        ...


Factory = Callable[[], EngineUnderTest]


def load_factory(name: str) -> Factory:
    """`my.module:factory`. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"--engine is {name!r}, must be MODULE:FACTORY")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--engine is {name!r}, which can't be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"--engine is {name!r}, must be something that can be called")
    made: Factory = factory
    return made
