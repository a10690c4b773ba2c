"""What an instance is started with, so that it runs as the placement has it. Pure."""

from __future__ import annotations

import math

import msgspec

from kvmig.placement.file import UnitPlacement


class InstanceStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """An order of `POST /kvmig/v1/instances`."""

    unit: str
    gpus: list[str]
    flags: str = ""
    decode_share: int | None = None
    """Percent of the device for steps with decodes only; None: as the deployment has it."""
    node: str = ""
    """Id of its Ray node, whose GPUs Ray chooses; empty: the deployment's host."""


def own_flags(placement: UnitPlacement, model: str, gpus: int, kv_bytes: int) -> str:
    """The engine's flags for an instance on `gpus` GPUs, where the placement has the model's
    instances on different numbers of them, or with KV caches of different sizes."""
    if not gpus:
        return ""
    places = [(unit, one) for unit in placement.units for one in unit.models if one.name == model]
    flags: list[str] = []
    if len({unit.size for unit, _ in places}) > 1:
        flags.append(f"--tensor-parallel-size={gpus}")
    if not placement.elastic and len({one.kv_bytes for _, one in places}) > 1:
        flags.append(f"--kv-cache-memory-bytes={kv_bytes // gpus}")
    return " ".join(flags)


def tenths(share: float) -> int:
    """A share of the device as a percentage that an instance can have: whole tenths, rounded up."""
    return min(100, max(10, 10 * math.ceil(round(10 * share, 6))))
