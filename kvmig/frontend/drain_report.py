"""The report of a server's drains: what keeps each request that is left where it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvmig.controlplane.refused_moves import FULL
from kvmig.core.api_records import (
    DRAIN_ENDED,
    DrainingInstance,
    DrainReport,
    DrainState,
    InstanceRow,
    RequestRow,
    StayingRequest,
)
from kvmig.kvtransfer.report import MigrationReport


def drain_report(
    instances: Sequence[InstanceRow],
    requests: Iterable[RequestRow],
    reports: Iterable[MigrationReport],
    unlike: Mapping[str, str],
) -> DrainReport:
    """The report of this server's drains.

    instances: all that this server knows, those of other servers too. reports: of the last
    migrations, oldest first. unlike: servers that can't take its requests, and why.
    """
    own = [row for row in instances if not row.server and row.state != "failed"]
    draining = {row.id: row for row in own if row.state == "draining"}
    last = {one.request_id: one for one in reports}
    blocked = [
        StayingRequest(id=one.id, call_id=one.call_id, instance=one.instance, why=why)
        for one in requests
        if (source := draining.get(one.instance)) is not None
        and (why := why_it_stays(one, source, instances, last.get(one.id), unlike))
    ]
    rows = [
        DrainingInstance(
            id=row.id,
            detail=row.detail,
            requests=row.running + row.waiting,
            unread=row.unread,
            migrations_out=row.migrations_out,
        )
        for row in draining.values()
    ]
    return DrainReport(state=_state(own), instances=rows, blocked=blocked)


def _state(own: Sequence[InstanceRow]) -> DrainState:
    """The state of the whole server, whose instances these are."""
    if any(row.state != "draining" for row in own):
        return "serving"
    return "drained" if all(_has_ended(row) for row in own) else "draining"


def _has_ended(row: InstanceRow) -> bool:
    """Whether the instance's drain is over. Between the moves of two idle sessions nothing is under
    way there; that all have gone, the launcher says."""
    busy = row.running + row.waiting + row.migrations_in + row.migrations_out
    return not busy and row.detail.startswith(DRAIN_ENDED)


def why_it_stays(
    request: RequestRow,
    source: InstanceRow,
    instances: Iterable[InstanceRow],
    last: MigrationReport | None,
    unlike: Mapping[str, str],
) -> str:
    """Name what keeps a request at a draining instance; empty: it moves, or its turn comes.

    last: the report of its last migration; None: there was none.
    """
    if request.migrating_to is not None:
        return ""
    if why := source.unmovable or request.unmovable:
        return why
    able = [row for row in instances if row.id != source.id and _may_take(row, source)]
    if not able:
        others = "".join(f"; {server} can't: {why}" for server, why in unlike.items())
        return f"no other instance serves that could take it{others}"
    roomy = [row for row in able if _has_room(row, request)]
    if not roomy:
        best = max(able, key=_free_blocks)
        seats = f", and runs {best.running} of {best.seats} requests" if best.seats else ""
        return (
            f"waiting for room: it holds {request.blocks} blocks, instance {best.id} has"
            f" {_free_blocks(best)} free{seats}"
        )
    if last is None or last.state == "committed":
        return ""
    said = f"{last.reason} {last.detail}".strip()
    return f"waiting for room: {said}" if last.reason in FULL else f"its last move failed: {said}"


def _may_take(row: InstanceRow, source: InstanceRow) -> bool:
    alike = (row.weights, row.numerics) == (source.weights, source.numerics)
    return row.state == "serving" and not row.unmovable and alike


def _has_room(row: InstanceRow, request: RequestRow) -> bool:
    seated = row.seats == 0 or row.running + row.migrations_in < row.seats
    return not request.blocks or (seated and _free_blocks(row) >= request.blocks)


def _free_blocks(row: InstanceRow) -> int:
    return row.blocks_total - row.blocks_used
