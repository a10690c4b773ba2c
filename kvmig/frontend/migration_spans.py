"""The spans of one migration, made of its report: its stages, and the pause in its parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvmig.kvtransfer.report import DowntimeParts, MigrationReport


class ReportSpan(NamedTuple):
    """A span, and those under it. Unix seconds, by the source's clock."""

    name: str
    began: float
    ended: float
    attributes: Mapping[str, str | int | float | bool]
    parts: tuple[ReportSpan, ...] = ()


def migration_span(report: MigrationReport) -> ReportSpan:
    """The migration's span. A report of an older source has no beginnings of stages and of the
    pause: they stand one after the other then."""
    began = report.ended_at - report.total_ms / 1e3
    attributes: dict[str, str | int | float | bool] = {
        "kvmig.migration.id": report.id,
        "kvmig.source": report.source,
        "kvmig.destination": report.destination,
        "kvmig.state": report.state,
        "kvmig.bytes": report.bytes,
        "kvmig.hit_blocks": report.hit_blocks,
    }
    known = {
        "kvmig.reason": report.reason or None,
        "kvmig.why": report.why or None,
        "kvmig.transport": report.transport or None,
        "kvmig.exact": report.exact,
        "kvmig.output_tokens": report.output_tokens,
    }
    attributes |= {name: value for name, value in known.items() if value is not None}
    parts = tuple(_parts(report, began))
    # The destination measures its first step, which may end after the source's report was made.
    ended = max([report.ended_at, *(part.ended for part in parts)])
    return ReportSpan("migrate", began, ended, attributes, parts)


def _parts(report: MigrationReport, began: float) -> Iterator[ReportSpan]:
    at = began
    for stage in report.stages:
        if stage.began_ms is not None:
            at = began + stage.began_ms / 1e3
        ended = at + stage.ms / 1e3
        yield ReportSpan(
            "stage", at, ended, {"kvmig.blocks": stage.blocks, "kvmig.bytes": stage.bytes}
        )
        at = ended
    if (pause := report.downtime_ms) is not None:
        if pause.began_ms is not None:
            at = began + pause.began_ms / 1e3
        yield _pause(pause, at, report.tail_blocks)


def _pause(pause: DowntimeParts, began: float, tail_blocks: int) -> ReportSpan:
    """The pause, whose parts follow each other."""
    at, parts = began, []
    for name, ms in (
        ("drain", pause.drain),
        ("tail copy", pause.tail_copy),
        ("commit", pause.commit),
        ("first token", pause.first_token),
    ):
        if ms is not None:
            parts.append(ReportSpan(name, at, at + ms / 1e3, {}))
            at += ms / 1e3
    return ReportSpan("pause", began, at, {"kvmig.blocks": tail_blocks}, tuple(parts))
