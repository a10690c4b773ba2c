"""What a model's engine will take of memory, as far as it follows from its files and flags alone.

An engine writes it (`kvmig.engines.kind.EnginePlugin.sizes`) before anything is loaded; the fleet
reads it to decide where a model fits. All sizes are bytes of each worker.
"""

from __future__ import annotations

import msgspec


class LayerSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one kind, and what they keep of a request."""

    kind: str
    """The engine's name of it."""
    layers: int
    token: int
    """Bytes that each token takes in all of them, padding included; 0: it doesn't grow with the
    tokens, or only up to a bound."""
    request: int
    """Bytes at most that one request of the model's whole length takes, padding included."""


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of each worker of an instance."""

    weights: int
    """Bytes of the weights, as the engine holds them."""
    files: int
    """Bytes of all the weights in the files, by the files' headers."""
    tokens: int
    """The longest request, in tokens."""
    workers: int = 1
    layers: tuple[LayerSizes, ...] = ()
    shortest: int = 0
    """Bytes at least of any request in the KV cache: a block of each group of layers. 0: not
    known."""
    reserved: int = 0
    """Bytes of the KV cache that the engine gives no request. 0: none, or not known."""

    @property
    def token(self) -> int:
        """Bytes that each token of a request adds to the KV cache."""
        return sum(one.token for one in self.layers)

    @property
    def request(self) -> int:
        """Bytes at most of one request of the model's whole length in the KV cache."""
        return sum(one.request for one in self.layers)


SIZES = "sizes: "
"""Begins the line in which a check of flags prints them."""


def encode_sizes(sizes: ModelSizes) -> str:
    """One line."""
    return SIZES + msgspec.json.encode(sizes).decode()


def sizes_in(lines: list[str]) -> str:
    """The sizes in what a check has printed, as JSON; empty: there are none."""
    found = [line.removeprefix(SIZES) for line in lines if line.startswith(SIZES)]
    return found[-1] if found else ""


def decode_sizes(text: str) -> ModelSizes | None:
    """Read such JSON; an empty text gives None. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=ModelSizes) if text else None
