"""Which flags instances take on one after the other, and in which steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.flag_rolls import (
    RolledStart,
    RollStep,
    behind,
    can_roll,
    grouped,
    has_others,
    has_rolled,
    next_roll,
    why_failed,
)
from kvmig.fleet.rollout import instance_start, need_of
from kvmig.fleet.spec import ModelSpec

SEQS = "--max-num-seqs=8"
START = RolledStart(SEQS)


def row(name: str, flags: str = "", state: str = "serving", used: int = 0) -> InstanceRow:
    detail = "" if state == "serving" else "no room"
    return InstanceRow(id=name, state=state, flags=flags, blocks_used=used, detail=detail)


def test_an_instance_that_only_starts_or_is_drained_has_nothing_to_become() -> None:
    """Else nothing would decide the number of instances until it serves."""
    same = [row("i0", SEQS), row("i1", SEQS, "starting"), row("i2", SEQS, "draining")]
    assert not has_others(same, START)
    assert has_others([*same, row("i3")], START)


def test_flags_are_grouped_with_their_values() -> None:
    assert grouped(["--a", "1", "--b=2", "--max_num_seqs", "-3"]) == [
        ("--a", ("--a", "1")), ("--b", ("--b=2",)), ("--max-num-seqs", ("--max_num_seqs", "-3")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "rolls"),
    [
        (["--seed=1"], ["--seed=1", SEQS], True),
        ([SEQS, "--seed=1"], ["--seed=1", "--max-num-seqs", "9"], True),
        ([SEQS], [], False),
        ([SEQS], ["--max-num-seqs=9", "--seed=1"], False),
        (["--seed=1"], ["--seed=2"], False),
    ],
)
def test_flags_of_scheduling_can_be_added_and_changed_but_not_taken_away(
    old: list[str], new: list[str], rolls: bool
) -> None:
    assert can_roll(old, new) == rolls
    one, other = (ModelSpec(name="a", source="path:/a", flags=tuple(each)) for each in (old, new))
    assert need_of(one, other) == ("roll" if rolls else "beside")
    assert instance_start(one, other) == (RolledStart(behind(new)) if rolls else None)
    assert instance_start(one, one) == RolledStart()


def test_another_build_of_vllm_is_taken_on_by_instances_also_with_other_flags() -> None:
    old = ModelSpec(name="a", source="path:/a")
    new = replace(old, vllm="/new", flags=(SEQS,))
    assert need_of(old, new) == "roll"
    assert instance_start(old, new) == RolledStart(SEQS, "/new")
    assert instance_start(new, new) == RolledStart("", "/new")
    assert instance_start(new, replace(new, vllm="")) == RolledStart()
    assert need_of(old, replace(new, source="path:/b")) == "beside"


def test_one_instance_at_a_time_starts_again_and_the_one_with_the_least_first() -> None:
    rows = [row("i0", used=9), row("i1", used=3), row("i2", SEQS)]
    assert next_roll(rows, START, 30) == RollStep("i1", START, 30)
    assert next_roll([*rows, row("i3", state="starting")], START) is None
    assert next_roll([*rows[:2], row("i2", state="draining")], START) is None
    waits = replace(row("i2"), detail="starts again when its turn comes")
    assert next_roll([*rows[:2], waits], START) is None
    assert next_roll([row("i0", SEQS)], START) is None


def test_an_only_instance_gets_another_one_first() -> None:
    assert next_roll([row("i0")], START) == RollStep("", START)
    assert next_roll([row("i0"), row("i1", SEQS, "failed")], START) == RollStep("", START)


def test_it_is_done_when_all_that_live_serve_with_the_flags() -> None:
    assert has_rolled([row("i0", SEQS), row("i1", "", "failed")], START)
    assert not has_rolled([row("i0", SEQS), row("i1")], START)
    assert not has_rolled([row("i0", SEQS), row("i1", SEQS, "starting")], START)
    assert not has_rolled([], START)


def test_one_that_did_not_start_with_them_is_named() -> None:
    tried = RollStep("i0", START)
    rows = [row("i0"), row("i1")]
    assert why_failed(rows, START, None) == ""
    assert why_failed(rows, START, RollStep("i0", RolledStart("--other"))) == ""
    assert why_failed([row("i0", state="draining"), row("i1")], START, tried) == ""
    assert why_failed(rows, START, tried) == f"instance i0 did not start with {SEQS}"
    added = [row("i0"), row("i1", SEQS, "failed")]
    assert why_failed(added, START, None) == "instance i1: no room"


@given(st.lists(st.booleans(), min_size=1, max_size=6))
def test_every_roll_comes_to_an_end_with_one_instance_at_least_that_serves(
    rolled: list[bool],
) -> None:
    rows = [row(f"i{at}", SEQS if one else "") for at, one in enumerate(rolled)]
    steps = 0
    while (step := next_roll(rows, START)) is not None:
        if step.instance:
            assert len(rows) > 1
            rows = [row(one.id, SEQS) if one.id == step.instance else one for one in rows]
        else:
            rows.append(row("i9", SEQS))
        steps += 1
    assert has_rolled(rows, START)
    assert steps <= len(rolled) + 1
