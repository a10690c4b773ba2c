"""How far the drain of a worker is, and how long it may still take. Pure; sizes are bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvmig.fleet.workers import FleetWorker

DrainState = Literal["draining", "late", "drained"]


class InstanceOnWorker(msgspec.Struct, frozen=True, kw_only=True):
    """An instance of a model on the worker."""

    model: str
    instance: str
    state: str
    streams: int = 0
    """Requests that run or wait on it."""
    kv_bytes: int = 0
    """KV cache that they use."""
    bytes_per_s: float | None = None
    """How fast streams of the model have moved lately; None: none has."""
    stays: str = ""
    """Why it stays for now; empty: it leaves, or is not meant to."""


class DrainForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What has still to move."""

    streams: int = 0
    kv_bytes: int = 0
    seconds: float | None = None
    """How long that takes, one stream after the other, as fast as the last ones; None: of a model
    with streams there, none has moved yet."""


class DrainView(msgspec.Struct, frozen=True, kw_only=True):
    """The drain of a worker."""

    state: DrainState
    since: float
    """Unix time."""
    deadline: float | None
    """Unix time; None: there is none."""
    left: DrainForecast
    blocked: dict[str, str]
    """Why instances stay for now, by model."""


def forecast(instances: Sequence[InstanceOnWorker]) -> DrainForecast:
    """What has still to move of these instances."""
    busy = [one for one in instances if one.kv_bytes]
    times = [one.kv_bytes / one.bytes_per_s for one in busy if one.bytes_per_s]
    return DrainForecast(
        streams=sum(one.streams for one in instances),
        kv_bytes=sum(one.kv_bytes for one in instances),
        seconds=sum(times) if len(times) == len(busy) else None,
    )


def drain_view(
    worker: FleetWorker, instances: Sequence[InstanceOnWorker], now: float
) -> DrainView | None:
    """The worker's drain; None: it is not drained. now: Unix time."""
    if worker.drained_at is None:
        return None
    late = worker.drain_until is not None and now > worker.drain_until
    state: DrainState = "late" if late else "draining"
    return DrainView(
        state=state if instances or worker.state == "unknown" else "drained",
        since=worker.drained_at,
        deadline=worker.drain_until,
        left=forecast(instances),
        blocked={one.model: one.stays for one in instances if one.stays},
    )
