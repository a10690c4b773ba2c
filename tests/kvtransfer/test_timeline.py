"""The pause of a migration is measured part by part, wherever it ends."""

from __future__ import annotations

from itertools import count

import pytest

from kvmig.kvtransfer.report import DowntimeParts
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline, Part

MOVE = MigrationSpec(mid="m", request_id="r", epoch=1, source="a", destination="b")
PARTS: list[Part] = ["drain", "tail copy", "commit"]


@pytest.mark.parametrize(
    ("marked", "downtime"),
    [
        (0, None),
        (1, DowntimeParts(1000.0, 0.0, 0.0, None, 1000.0)),
        (2, DowntimeParts(1000.0, 1000.0, 0.0, None, 1000.0)),
        (3, DowntimeParts(1000.0, 1000.0, 1000.0, None, 1000.0)),
    ],
)
def test_a_pause_ends_in_whatever_part_it_was(marked: int, downtime: DowntimeParts | None) -> None:
    seconds = count()
    timeline = MigrationTimeline(MOVE, lambda: float(next(seconds)))
    for part in PARTS[:marked]:
        timeline.mark(part)
    timeline.resumed()
    assert timeline.downtime() == downtime
    timeline.resumed()  # a clean-up that is repeated
    assert timeline.downtime() == downtime


def test_a_part_counts_once_the_next_one_has_begun() -> None:
    seconds = count()
    timeline = MigrationTimeline(MOVE, lambda: float(next(seconds)))
    timeline.mark("drain")
    assert timeline.downtime() is None
    timeline.mark("tail copy")
    assert timeline.downtime() == DowntimeParts(1000.0, 0.0, 0.0, None, 1000.0)
