"""Instances as a scheduler sees them, made from what they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from kvmig.controlplane.messages import ClusterMember, LoadReport
from kvmig.controlplane.scheduler import InstancePairing
from kvmig.controlplane.view import ClusterView, InstanceView, ViewBuilder
from kvmig.engines.base import ClassLoad, EngineLoad


def instance(
    name: str,
    used: int = 0,
    running: int = 0,
    queue: Sequence[int] = (),
    *,
    out: int = 0,
    total: int = 100,
    state: str = "serving",
    classes: Sequence[ClassLoad] = (),
    headroom: Mapping[int, float] | None = None,
    preempted: int = 0,
    reported_at: float | None = 0.0,
) -> InstanceView:
    """As the builder makes it from a report.

    queue: the demand of each that waits; preempted: how many of them ran before.
    """
    load = EngineLoad(
        total,
        used,
        running,
        waiting=len(queue),
        head_blocks=queue[0] if queue else 0,
        waiting_blocks=sum(queue),
        classes=tuple(classes),
        preempted_waiting=preempted,
    )
    builder = ViewBuilder()
    builder.join(ClusterMember(name, f"tcp://{name}"))
    builder.report(LoadReport(name, 0, load, 0, out, state, headroom=dict(headroom or {})), 0.0)
    return replace(builder.view(0.0).instances[0], reported_at=reported_at)


def cluster(*instances: InstanceView) -> ClusterView:
    """Half a second later."""
    return ClusterView(0.5, instances)


def short(pairings: list[InstancePairing]) -> list[tuple[str, str, str, float]]:
    """Why, from where, to where, and how many blocks."""
    return [(one.why, one.source, one.destination, one.budget_blocks) for one in pairings]
