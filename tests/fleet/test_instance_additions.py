"""When another instance is tried whose model's last ones have not started."""

from __future__ import annotations

import itertools

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.autoscale import ScalingOrder
from kvmig.fleet.instance_additions import LAST_PAUSE_S, InstanceAdditions

SERVES = InstanceRow(id="i0", state="serving")
STARTS = InstanceRow(id="i1", state="starting")
FAILED = InstanceRow(id="i1", state="failed")


def test_pauses_grow_to_five_minutes() -> None:
    additions, now, tries = InstanceAdditions(), 0.0, []
    while now < 2000:
        if additions.next_order([SERVES], 2, now) is not None:
            tries.append(now)
            additions.fail("no")
        now += 1
    assert max(later - before for before, later in itertools.pairwise(tries)) <= (LAST_PAUSE_S + 1)
    assert len(tries) == 11


def test_what_has_failed_is_taken_out_at_once() -> None:
    additions = InstanceAdditions()
    additions.fail("no")
    assert additions.next_order([SERVES, FAILED], 2, 0.0) == ScalingOrder(1, ["i1"])


def test_an_instance_that_starts_is_not_one_that_serves() -> None:
    additions = InstanceAdditions()
    additions.fail("no")
    assert additions.next_order([SERVES, STARTS], 2, 0.0) is None
    assert additions.sentence == "no other instance starts: no; the next try is in 10 s"
    assert additions.next_order([SERVES, SERVES], 2, 0.0) is None
    assert additions.sentence == ""
