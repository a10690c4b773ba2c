"""The bytes that an instance takes of each of its GPUs, before it has ever started. Pure.

Weights and KV cache follow from the model's files and flags. The rest (working memory of a step,
CUDA graphs, contexts) shows only once an instance runs: until then it is assumed, or taken from
other models of this machine that have run. What an instance was measured to use goes before all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from kvmig.core.model_sizes import ModelSizes
from kvmig.fleet.device_room import DeviceNeed
from kvmig.fleet.spec import ModelSpec, text_in

GIB = 1 << 30
REST = 3 * GIB
"""Assumed for all but weights and KV cache while no instance of the engine has been measured."""
OUTSIDE = GIB
"""Part of it that vLLM doesn't count: CUDA's contexts, kvmig's own among them, and buffers."""
KV_PART = 4
"""A KV cache without a given size takes at most this part of a GPU."""
SHARE_FLAG, KV_FLAG = "--gpu-memory-utilization", "--kv-cache-memory-bytes"

Basis = Literal["measured", "gpu_memory", "flags", "estimated"]


@dataclass(frozen=True, slots=True)
class DeviceClaim:
    """Bytes of each GPU of an instance."""

    each: int
    basis: Basis
    weights: int = 0
    kv: int = 0
    """Bytes of the KV cache; 0: it takes what the others leave of `each`."""
    rest: int = 0
    bounds: bool = False
    """Whether the launcher is to keep an instance to `each`; else the flags set what it takes."""
    parked: int = 0
    """Bytes while it is parked."""


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of a model beyond its specification."""

    weights: int = 0
    """Bytes of its weights' files."""
    sizes: ModelSizes | None = None
    """What its engine says; None: it hasn't been asked."""
    rest: int = REST
    """Bytes of all but weights and KV cache."""
    measured: int = 0
    """Bytes that an instance used at most; 0: none has run."""
    rest_basis: str = "assumed"
    """The origin of `rest`, for people."""


def claim_of(spec: ModelSpec, known: KnownSizes, total: int) -> DeviceClaim | None:
    """What an instance claims; None: it uses no GPU. total: bytes of the largest GPU."""
    if spec.engine == "toy":
        return DeviceClaim(spec.memory_each, "gpu_memory", parked=spec.memory_each // 2)
    if spec.engine == "command":  # what a command takes is what its user says
        return DeviceClaim(spec.memory_each, "gpu_memory") if spec.memory_each else None
    if spec.engine == "transformers" and text_in(spec.flags, "--device") != "cuda":
        return None
    made = _before_it_runs(spec, known, total)
    if (
        not known.measured or spec.memory_each or spec.unit
    ):  # what is measured has pages of the unit
        return made
    # An engine that is kept to its claim may take all of that at its next start.
    each = max(known.measured, made.each if made.bounds else 0)
    return DeviceClaim(
        each, "measured", made.weights, made.kv, made.rest, made.bounds, min(made.parked, each)
    )


def _before_it_runs(spec: ModelSpec, known: KnownSizes, total: int) -> DeviceClaim:
    sizes = known.sizes
    weights = known.weights // spec.workers if sizes is None else sizes.weights
    if spec.unit:  # its KV cache is the unit's
        basis: Basis = "gpu_memory" if spec.memory_each else "estimated"
        return DeviceClaim(
            spec.memory_each or weights + known.rest, basis, weights, rest=known.rest
        )
    kv = size_in(text_in(spec.flags, KV_FLAG))
    share = _share_in(text_in(spec.flags, SHARE_FLAG))
    of_flags = bool(kv or share)
    if spec.memory_each:
        own = not of_flags and spec.engine == "vllm"
        beside = max(0, spec.memory_each - weights - known.rest)
        return DeviceClaim(
            spec.memory_each, "gpu_memory", weights, kv or beside, known.rest, own, known.rest
        )
    if share and not kv:
        each = int(share * total) + OUTSIDE
        return DeviceClaim(each, "flags", weights, rest=known.rest, parked=min(each, known.rest))
    if kv:
        each = weights + kv + known.rest
        return DeviceClaim(each, "flags", weights, kv, known.rest, parked=known.rest)
    kv = usual_kv(spec, sizes, total)
    each = weights + kv + known.rest
    own = spec.engine == "vllm"
    return DeviceClaim(each, "estimated", weights, kv, known.rest, own, known.rest)


def usual_kv(spec: ModelSpec, sizes: ModelSizes | None, total: int) -> int:
    """Bytes of a KV cache without a given size: room for as many requests of the model's whole
    length as one instance is for, in a part of a GPU; but one at least. A block is the engine's."""
    if sizes is None:
        return total // KV_PART
    at_once = math.ceil(spec.instances.target) if spec.instances.target_kind == "concurrency" else 8
    wanted = min(at_once * sizes.request + sizes.reserved, total // KV_PART)
    return max(sizes.request + sizes.reserved, wanted)


def need_of(spec: ModelSpec, claim: DeviceClaim | None) -> DeviceNeed | None:
    """What its instances want of GPUs. The GPUs' names are still the user's."""
    if claim is None:
        return None
    return DeviceNeed(claim.each, spec.workers, frozenset(spec.gpus))


_STEPS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_STEPS |= {name.upper(): 1024**power for power, name in enumerate(["", "k", "m", "g", "t"]) if name}


def size_in(text: str) -> int:
    """Bytes, as vLLM's flags have them: 64M is 64 MiB, 64m is 64 MB; 0: it is no size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    return int(float(found[1]) * _STEPS[found[2]]) if found else 0


def _share_in(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text or 0)))
    except ValueError:  # the engine's own parser refuses it
        return 0.0
