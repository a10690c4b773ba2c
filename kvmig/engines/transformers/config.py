"""An engine's configuration, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.engines.identity import identity_of
from kvmig.models import BUNDLED


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of one engine. Sizes of the KV cache in blocks of `block_tokens` tokens."""

    model: str = str(BUNDLED)
    """Folder or name of a checkpoint, or only of its configuration with `random_weights`."""
    random_weights: bool = False
    """Don't load weights but draw them, by `weights_seed`."""
    weights_seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of weights and KV cache; cuda: torch's current GPU."""
    block_tokens: int = 16
    num_blocks: int = 256
    """KV blocks; in a pool: most of one request, and the pool has that many for each engine,
    however much the others hold beyond theirs."""
    max_batch_tokens: int = 256
    """Tokens that one step computes."""
    max_batch_requests: int = 32
    """Requests in one step."""
    share_prefixes: bool = True
    """Whether requests that begin alike share KV blocks."""


def identify(config: EngineConfig) -> str:
    """The identity of the weights that an engine would have that is made now."""
    drawn = config.weights_seed if config.random_weights else ""
    return identity_of(config.model, (drawn,))


def parse(fields: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError with the field, its value and what is allowed."""
    for field, kind in get_type_hints(EngineConfig).items():
        if get_origin(kind) is Literal and fields.get(field, get_args(kind)[0]) not in get_args(
            kind
        ):
            raise ConfigError(
                f"transformers engine: {field} is {fields[field]!r},"
                f" must be {' or '.join(get_args(kind))}"
            )
    try:
        config = msgspec.convert(dict(fields), EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"transformers engine: {error}") from error
    for field, least in (
        ("block_tokens", 4),
        ("num_blocks", 1),
        ("max_batch_tokens", 1),
        ("max_batch_requests", 1),
    ):
        value = getattr(config, field)
        if value < least:
            raise ConfigError(f"transformers engine: {field} is {value}, must be {least} or more")
    return config
