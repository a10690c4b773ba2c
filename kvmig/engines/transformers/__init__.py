"""Hugging Face transformers' continuous batching, unmodified, behind the Engine port."""

from __future__ import annotations

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
