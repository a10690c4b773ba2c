"""What a server's report of its drain says of the requests that are left."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import DRAIN_ENDED, InstanceRow, RequestRow
from kvmig.frontend.drain_report import drain_report
from kvmig.kvtransfer.report import MigrationReport

HERE = InstanceRow(
    id="a", state="draining", blocks_total=100, blocks_used=20, running=2, weights="w", numerics="n"
)
EMPTY = replace(HERE, running=0, detail=DRAIN_ENDED)
THERE = replace(HERE, id="b", state="serving", server="toy at B", running=3, seats=9)
REQUEST = RequestRow(id="r", call_id="c", instance="a", state="running", blocks=10)
REFUSED = MigrationReport(
    id="m", request_id="r", source="a", destination="b", state="aborted", reason="no_blocks"
)


def whys(
    there: InstanceRow = THERE,
    request: RequestRow = REQUEST,
    here: InstanceRow = HERE,
    *reports: MigrationReport,
) -> list[str]:
    report = drain_report([here, there], [request], reports, {"toy at C": "its weights is v"})
    return [one.why for one in report.blocked]


def test_a_request_whose_turn_comes_or_that_moves_is_not_blocked() -> None:
    assert whys() == []
    assert whys(replace(THERE, blocks_used=99), replace(REQUEST, migrating_to="b")) == []
    assert whys(THERE, replace(REQUEST, instance="b")) == []
    assert whys(THERE, REQUEST, HERE, replace(REFUSED, state="committed", reason="")) == []


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (replace(THERE, blocks_used=95), "it holds 10 blocks, instance b has 5 free"),
        (replace(THERE, running=9), "instance b has 80 free, and runs 9 of 9 requests"),
        (replace(THERE, running=8, migrations_in=1), "waiting for room"),
    ],
)
def test_a_request_that_finds_no_room_waits_for_it(there: InstanceRow, words: str) -> None:
    (why,) = whys(there)
    assert why.startswith("waiting for room: ")
    assert words in why


def test_a_request_that_was_refused_for_want_of_room_waits_for_it() -> None:
    detailed = replace(REFUSED, detail="no room for 40 tokens")
    assert whys(THERE, REQUEST, HERE, detailed) == [
        "waiting for room: no_blocks no room for 40 tokens"
    ]


def test_one_that_failed_for_another_reason_names_it() -> None:
    failed = replace(REFUSED, reason="timeout")
    assert whys(THERE, REQUEST, HERE, failed) == ["its last move failed: timeout"]


@pytest.mark.parametrize(
    "there",
    [
        replace(THERE, state="draining"),
        replace(THERE, weights="v"),
        replace(THERE, numerics="m"),
        replace(THERE, unmovable="why"),
    ],
)
def test_without_another_instance_the_report_names_the_unlike_servers(there: InstanceRow) -> None:
    assert whys(there) == [
        "no other instance serves that could take it; toy at C can't: its weights is v"
    ]


def test_what_cannot_be_moved_at_all_says_why() -> None:
    assert whys(THERE, replace(REQUEST, unmovable="a connector holds it")) == [
        "a connector holds it"
    ]
    assert whys(THERE, REQUEST, replace(HERE, unmovable="an engine")) == ["an engine"]


def test_a_server_is_not_drained_between_the_moves_of_two_idle_sessions() -> None:
    resting = replace(HERE, running=0)  # nothing is under way, and the drain goes on

    for state in ("draining", "failed"):
        other = replace(EMPTY, id="c", state=state)
        assert drain_report([resting, other, THERE], [], [], {}).state == "draining"


@pytest.mark.parametrize(
    ("here", "state"),
    [
        (replace(HERE, state="serving"), "serving"),
        (HERE, "draining"),
        (replace(HERE, running=0, migrations_out=1), "draining"),
        (replace(EMPTY, running=1), "draining"),
        (EMPTY, "drained"),
        (
            replace(EMPTY, detail="it is empty; 3 idle sessions moved (1.0 MB), 0 did not"),
            "drained",
        ),
        (replace(HERE, state="failed"), "drained"),
    ],
)
def test_a_server_is_drained_when_nothing_runs_on_it(here: InstanceRow, state: str) -> None:
    assert drain_report([here, THERE], [], [], {}).state == state


def test_what_other_engines_are_still_to_read_of_a_draining_instance_is_shown() -> None:
    waits = replace(HERE, running=0, unread=3, detail="waits until other engines have read it")

    report = drain_report([waits, THERE], [], [], {})

    assert (report.state, report.instances[0].unread) == ("draining", 3)
