"""Cost models: how long steps and copies take on one kind of GPU, and what it holds.

A file is TOML with the fields of `CostModel`; see kvmig_tools/sim/gpus.
"""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec

from kvmig.core.errors import ConfigError


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """base + per_token n + per_token_squared n^2 milliseconds for a prompt of n tokens."""

    base_ms: float
    per_token_ms: float
    per_token_squared_ms: float = 0.0


class Decode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """base + per_sequence B + per_context_token T milliseconds a step of B sequences."""

    base_ms: float
    per_sequence_ms: float
    per_context_token_ms: float


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One copy stage: `stage_ms`, then the bytes at the bandwidth that this copy gets."""

    stage_ms: float
    bytes_per_token: int
    bandwidth: float
    """Bytes a second out of an instance, and into it, all its copies together."""
    hop_ms: float = 0.5
    """One control message between two llumlets."""


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An instance's memory and limits, and how its engine's scheduler takes prompts in."""

    blocks: int
    block_tokens: int
    max_sequences: int
    max_batch_tokens: int
    prefill: Literal["first", "chunked"]
    """first: whole prompts, in steps of their own that go before all decoding;
    chunked: what a step's tokens leave of `max_batch_tokens` goes to prompts."""
    watermark: float = 0.0
    """Share of the blocks that admission leaves free."""
    max_model_tokens: int = 0
    """Longest request; 0: what the blocks hold."""
    prefix_cache: bool = False
    """Whether freed blocks are found again by their content."""

    @property
    def largest(self) -> int:
        """Tokens of the largest request that can run."""
        most = self.blocks * self.block_tokens
        return min(most, self.max_model_tokens) if self.max_model_tokens else most


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU (or what serves as one) with one model."""

    name: str
    prefill: Prefill
    decode: Decode
    copy: Copy
    capacity: Capacity
    source: str = ""
    """Where the figures are from."""
    start_s: float = 30.0
    """From the decision to add an instance until it serves."""

    def prompt_s(self, tokens: int, computed: int = 0) -> float:
        """Seconds that `tokens` more of a prompt take after `computed`, without the base."""
        one = self.prefill
        squares = tokens * (tokens + 2 * computed)
        return (one.per_token_ms * tokens + one.per_token_squared_ms * squares) / 1e3

    def decode_s(self, sequences: int, context: int) -> float:
        """Seconds of one step."""
        one = self.decode
        return (
            one.base_ms + one.per_sequence_ms * sequences + one.per_context_token_ms * context
        ) / 1e3


def known() -> list[str]:
    """Names of the models that come with kvmig."""
    return sorted(
        one.name.removesuffix(".toml")
        for one in files("kvmig_tools.sim").joinpath("gpus").iterdir()
        if one.name.endswith(".toml")
    )


def load(name: str) -> CostModel:
    """A cost model by name, or from a file. Raises ConfigError that names what is wrong."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--gpu {name}: {error.strerror}") from error
    elif name in known():
        text = files("kvmig_tools.sim").joinpath("gpus", f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise ConfigError(f"--gpu is {name}, must be {' or '.join(known())} or a .toml file")
    try:
        return check(msgspec.toml.decode(text, type=CostModel), name)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--gpu {name}: {error}") from error


def check(model: CostModel, name: str) -> CostModel:
    """`model`, if an engine could be so. Raises ConfigError that names the field."""
    capacity, copy = model.capacity, model.copy
    prefill, decode = model.prefill, model.decode
    rules: tuple[tuple[str, float, float], ...] = (
        ("capacity.blocks", capacity.blocks, 1),
        ("capacity.block_tokens", capacity.block_tokens, 1),
        ("capacity.max_sequences", capacity.max_sequences, 1),
        ("capacity.max_batch_tokens", capacity.max_batch_tokens, capacity.max_sequences + 1),
        ("capacity.max_model_tokens", capacity.max_model_tokens, 0),
        ("capacity.watermark", capacity.watermark, 0),
        ("prefill.base_ms", prefill.base_ms, 0),
        ("prefill.per_token_ms", prefill.per_token_ms, 0),
        ("prefill.per_token_squared_ms", prefill.per_token_squared_ms, 0),
        ("decode.base_ms", decode.base_ms, 1e-6),
        ("decode.per_sequence_ms", decode.per_sequence_ms, 0),
        ("decode.per_context_token_ms", decode.per_context_token_ms, 0),
        ("copy.stage_ms", copy.stage_ms, 0),
        ("copy.bytes_per_token", copy.bytes_per_token, 1),
        ("copy.bandwidth", copy.bandwidth, 1),
        ("copy.hop_ms", copy.hop_ms, 0),
        ("start_s", model.start_s, 0),
    )
    for field, value, least in rules:
        if not least <= value < math.inf:
            raise ConfigError(f"--gpu {name}: {field} is {value}, must be {least} or more")
    if capacity.watermark >= 1:
        raise ConfigError(
            f"--gpu {name}: capacity.watermark is {capacity.watermark}, must be below 1"
        )
    return model
