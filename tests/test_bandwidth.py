"""What reports say of the speed of migrations."""

from __future__ import annotations

import pytest

from kvmig.kvtransfer.measured import BlockRate
from kvmig.kvtransfer.report import MigrationReport, StageReport


def report(*stages: StageReport) -> MigrationReport:
    return MigrationReport(
        id="m", request_id="r", source="a", destination="b", state="committed", stages=[*stages]
    )


def test_the_first_measurement_counts_whole_and_later_ones_in_part() -> None:
    rate = BlockRate(block_bytes=1000)
    assert rate.blocks_s == 0
    rate.observe(report(StageReport(10, 10_000, 50.0), StageReport(10, 10_000, 50.0)))
    assert rate.blocks_s == pytest.approx(200)
    rate.observe(report(StageReport(10, 10_000, 100.0)))
    assert rate.blocks_s == pytest.approx(200 + 0.3 * (100 - 200))


def test_a_migration_that_copied_nothing_live_says_nothing() -> None:
    rate = BlockRate(block_bytes=1000)
    rate.observe(report(StageReport(10, 10_000, 50.0)))
    for nothing in (report(), report(StageReport(0, 0, 3.0))):
        rate.observe(nothing)
        assert rate.blocks_s == pytest.approx(200)
