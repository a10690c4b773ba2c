"""Differences of vLLM's supported versions: the only place that branches, by what is there."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

try:
    from vllm.entrypoints.common import cli_args
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers import cli_args

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planning

__all__ = ("cache_groups", "cli_args", "pool_block", "refuse")


def cache_groups(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> Sequence[KVCacheGroupSpec]:
    """Groups of the KV cache of a model whose workers all have these layers."""
    whole_model = getattr(planning, "get_global_kv_cache_groups", None)
    if whole_model is not None:  # from 0.33 on: a model or a platform may have groups of its own
        return whole_model(config, [specs])
    return planning.get_kv_cache_groups(config, dict(specs))


def pool_block(config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Bytes of one block of the pool that all groups take theirs of."""
    return planning._pool_bytes_per_block(config, groups)


def refuse(core: EngineCoreProc, request: EngineCoreRequest, error: Exception) -> None:
    """vLLM's own answer to a request that can't be built: logged, and ended as an error.

    From 0.33 on the client learns why where the request is to blame.
    """
    invalid = getattr(core, "_handle_request_validation_error", None)
    if invalid is not None and isinstance(error, VLLMValidationError):
        invalid(request, error)
    else:
        core._handle_request_preproc_error(request)
