"""Hugging Face transformers' continuous batching, unmodified, behind the Engine port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from kvmig.engines.transformers.serving import ServingTransformers


def factory(**config: Any) -> ServingTransformers:
    """A new engine; `config`: fields of `config.EngineConfig`, by default the bundled model.

    Raises StartupError for a version of transformers that is not supported, ConfigError for a
    field that can't be used, UnsupportedLayout for a model whose KV cache can't be moved.
    """
    from kvmig.engines.transformers.versions import check_version

    check_version()
    from kvmig.engines.transformers.config import parse
    from kvmig.engines.transformers.serving import ServingTransformers

    return ServingTransformers(parse(config))


def pooled(
    num_bytes: int,
    engines: Mapping[str, Mapping[str, Any]],
    cut: Literal["sectors", "head-wise"] = "sectors",
) -> dict[str, ServingTransformers]:
    """Engines of several models, by name, whose KV caches share `num_bytes` of this process.

    engines: of each, fields as of `factory`; `num_blocks` is what one of its requests can have,
    and all the engines' together must fit. cut: what they take and give, see
    `kvmig.engines.transformers.pool`. Each is closed by itself, and then gives back its part.
    Raises what `factory` does, and ConfigError for engines that can't share, or not in that few
    bytes: nothing is loaded then.
    """
    from kvmig.engines.transformers.versions import check_version

    check_version()
    from kvmig.core.errors import ConfigError
    from kvmig.engines.transformers.config import parse
    from kvmig.engines.transformers.model import read_config
    from kvmig.engines.transformers.pool import Cut, SharedPool, shape_of
    from kvmig.engines.transformers.serving import ServingTransformers

    if cut not in get_args(Cut):
        raise ConfigError(
            f"transformers pool: cut is {cut!r}, must be {' or '.join(get_args(Cut))}"
        )
    configs = {name: parse(fields) for name, fields in engines.items()}
    shapes = {
        name: (one, shape_of(one, read_config(one).get_text_config()))
        for name, one in configs.items()
    }
    pool = SharedPool(num_bytes, shapes, cut)
    return {name: ServingTransformers(one, pool) for name, one in configs.items()}
