"""Hugging Face transformers' continuous batching, unmodified, behind the Engine port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmig.engines.transformers.serving import ServingTransformers


def factory(**config: Any) -> ServingTransformers:
    """A new engine; `config`: fields of `config.EngineConfig`, by default the bundled model.

    Raises StartupError for a version of transformers that is not supported, ConfigError for a
    field that can't be used, UnsupportedLayout for a model whose KV cache can't be moved.
    """
    from kvmig.engines.transformers.kind import check_version

    check_version()
    from kvmig.engines.transformers.config import parse
    from kvmig.engines.transformers.serving import ServingTransformers

    return ServingTransformers(parse(config))


def pooled(
    num_bytes: int, engines: Mapping[str, Mapping[str, Any]]
) -> dict[str, ServingTransformers]:
    """Engines of several models, by name, whose KV caches share `num_bytes` of this process.

    engines: of each, fields as of `factory`; `num_blocks` is what one of its requests can have,
    and all the engines' together must fit. Each is closed by itself, and then gives back its part.
    Raises what `factory` does, and ConfigError for engines that can't share, or not in so few
    bytes: nothing is loaded then.
    """
    from kvmig.engines.transformers.kind import check_version

    check_version()
    from kvmig.engines.transformers.config import parse
    from kvmig.engines.transformers.model import read_config
    from kvmig.engines.transformers.pool import Pool, block_bytes
    from kvmig.engines.transformers.serving import ServingTransformers

    configs = {name: parse(fields) for name, fields in engines.items()}
    sizes = {
        name: (one, block_bytes(one, read_config(one).get_text_config()))
        for name, one in configs.items()
    }
    pool = Pool(num_bytes, sizes)
    return {name: ServingTransformers(one, pool) for name, one in configs.items()}
