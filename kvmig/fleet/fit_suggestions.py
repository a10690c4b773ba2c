"""Changes of a specification by which a model may fit that does not. Pure.

These are only worth a try: the fleet's API evaluates each before it suggests one.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from kvmig.fleet.device_claims import KV_FLAG
from kvmig.fleet.evaluate import FitSuggestion, FitVerdict
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tensor_parallel import candidates, is_open

LENGTH_FLAG, WORKERS_FLAG = "--max-model-len", "--tensor-parallel-size"
LENGTH_STEP = 128
"""Lengths of requests are multiples of it, in tokens."""


def changes(spec: ModelSpec, found: FitVerdict, heads: int) -> Iterator[ModelSpec]:
    """Specifications to try. found: the evaluation of this one, by which it does not fit.
    heads: attention heads of the model; 0: not known."""
    if found.gpus and spec.engine == "vllm" and not is_open(spec):
        more = (one for one in candidates(len(found.gpus), heads) if one > spec.workers)
        yield from (_widened(spec, one) for one in more)
    if (shorter := _shortened(spec, found)) is not None:
        yield shorter


def suggestion(spec: ModelSpec, changed: ModelSpec, found: FitVerdict) -> FitSuggestion:
    """The suggestion of a change that fits. found: its evaluation."""
    return FitSuggestion(
        flags=tuple(changed.flags[len(spec.flags) :]),
        gpus_per_instance=changed.gpus_per_instance if spec.gpus_per_instance else 0,
        max_tokens=found.max_tokens,
        need_bytes=found.gpus[0].need_bytes if found.gpus else found.host.need_bytes,
    )


def _widened(spec: ModelSpec, gpus: int) -> ModelSpec:
    """The specification with more GPUs for an instance."""
    flags = (*spec.flags, f"{WORKERS_FLAG}={gpus}")
    return replace(spec, flags=flags, gpus_per_instance=gpus if spec.gpus_per_instance else 0)


def _shortened(spec: ModelSpec, found: FitVerdict) -> ModelSpec | None:
    """The specification with the longest requests that memory has room for; None: it has room for
    none, or what they take is not known."""
    if not found.token_bytes:
        return None
    kept = found.request_bytes - found.token_bytes * found.max_tokens  # however long a request is
    cache = (found.kv_bytes or found.request_bytes + found.block_bytes) - _missing(found)
    tokens = (cache - kept - found.block_bytes) // found.token_bytes // LENGTH_STEP * LENGTH_STEP
    tokens = min(tokens, found.max_tokens)
    if tokens <= 0:
        return None
    flags = [f"{LENGTH_FLAG}={tokens}"]
    if _missing(found):
        flags.append(f"{KV_FLAG}={cache}")
    return replace(spec, flags=(*spec.flags, *flags))


def _missing(found: FitVerdict) -> int:
    """Bytes of each worker that are too few where it would start."""
    if found.gpus:
        return max(0, min(one.need_bytes - one.free_bytes for one in found.gpus))
    return max(0, -(-(found.host.need_bytes - found.host.free_bytes) // found.workers))
