"""What `kvmig top` shows of a fleet, as rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.cli.top.plain_text import bar, middle, plain
from kvmig.cli.top.table_rows import (
    DEVICE_SORTS,
    INSTANCE_SORTS,
    MOVE_SORTS,
    STREAM_SORTS,
    SortOrder,
    destinations,
    device_rows,
    instance_rows,
    last_move,
    move_rows,
    next_sort,
    shows,
    stream_rows,
    summary,
)
from kvmig.core.live_records import LiveDevice, LiveFleet, LiveModel
from tests.support.live_fleets import AT, instance, move, stream, two_models

NAME = SortOrder("name")


def firsts(rows: list[Any]) -> list[str]:
    return [row.cells[0].strip() for row in rows]


def test_instances_stand_below_their_model() -> None:
    rows = instance_rows(two_models(), "", NAME)
    assert firsts(rows) == ["a", "i0", "i1", "b"]
    assert rows[0].cells == ("a", "serving", "2 of 2", "2", "", "", "")
    assert rows[1].cells[1:5] == ("serving", "██████░░  75%", "2", "0")
    assert [row.look for row in rows] == ["title", "good", "good", "dim"]


def test_an_instance_shows_where_it_is_and_what_is_wrong_with_it() -> None:
    fleet = replace(
        two_models(),
        instances=(
            instance("a", "i0", worker="node-1", gpus=("GPU 3",)),
            instance("a", "i1", worker="local", host="box"),
            instance("a", "i2", state="hung", detail="no step for 30 s"),
            instance("a", "i3", migrations_out=2, migrations_in=1),
        ),
    )
    rows = instance_rows(fleet, "", NAME)[1:5]
    assert [row.cells[6] for row in rows] == ["node-1, GPU 3", "box", "no step for 30 s", ""]
    assert [row.look for row in rows] == ["good", "good", "bad", "moving"]
    assert rows[3].cells[5] == "←1→2"


def test_instances_are_ordered_within_their_model_and_models_by_their_sums() -> None:
    fleet = LiveFleet(
        at=AT,
        models=(LiveModel(name="a", state="serving"), LiveModel(name="b", state="serving")),
        instances=(instance("a", "i0", 10), instance("b", "i0", 20), instance("b", "i1", 30)),
    )
    assert firsts(instance_rows(fleet, "", SortOrder("KV cache"))) == ["b", "i1", "i0", "a", "i0"]
    reverse = instance_rows(fleet, "", SortOrder("KV cache", reverse=True))
    assert firsts(reverse) == ["a", "i0", "b", "i0", "i1"]


def test_a_tenth_instance_comes_after_the_second() -> None:
    instances = tuple(instance("a", f"i{at}") for at in (10, 2, 1))
    fleet = replace(two_models(), instances=instances)
    assert firsts(instance_rows(fleet, "", NAME))[1:4] == ["i1", "i2", "i10"]


def test_a_filter_leaves_a_model_with_all_its_instances_or_instances_with_their_model() -> None:
    assert firsts(instance_rows(two_models(), "b", NAME)) == ["b"]
    fleet = replace(two_models(), models=(LiveModel(name="qwen", state="serving"),))
    fleet = replace(fleet, instances=(instance("qwen", "i0"), instance("qwen", "i1")))
    assert firsts(instance_rows(fleet, "QWEN", NAME)) == ["qwen", "i0", "i1"]
    assert firsts(instance_rows(fleet, "i1", NAME)) == ["qwen", "i1"]
    assert instance_rows(fleet, "none of it", NAME) == []


def test_each_word_of_a_filter_must_be_somewhere() -> None:
    assert shows("i0 QWEN", "qwen", "i0")
    assert not shows("i0 llama", "qwen", "i0")
    assert shows("", "qwen")


def test_a_stream_that_moves_shows_from_where_to_where() -> None:
    fleet = replace(
        two_models(),
        streams=(
            stream("a", "goes", "i0", 30, migrating_to="i1"),
            stream("a", "came", "i1", 20),
            stream("a", "came-before", "i1", 10),
            stream("a", "stays", "i1", 5),
        ),
        moves=(move("a", "came", AT - 1), move("a", "came-before", AT - 60)),
    )
    rows = stream_rows(fleet, "", SortOrder("tokens"))
    assert [row.cells[2] for row in rows] == ["i0 → i1", "i1 ← i0", "i1", "i1"]
    assert [row.look for row in rows] == ["moving", "moving", "", ""]


def test_of_a_stream_that_moved_twice_the_last_move_is_shown() -> None:
    moves = move("a", "x", AT, source="i2"), move("a", "x", AT - 1, source="i1")
    fleet = replace(two_models(), streams=(stream("a", "x", "i1"),), moves=moves)
    (row,) = stream_rows(fleet, "", SortOrder("tokens"))
    assert row.cells[2] == "i1 ← i2"


def test_a_migration_that_was_aborted_is_no_way_that_a_stream_came() -> None:
    fleet = replace(two_models(), moves=(move("a", "cmpl-1", state="aborted", reason="busy"),))
    assert [row.look for row in stream_rows(fleet, "", SortOrder("tokens"))] == ["", ""]
    (row,) = move_rows(fleet, "", SortOrder("ended"))
    assert (row.cells[4], row.look) == ("aborted: busy", "bad")


def test_the_last_migration_is_a_line_with_its_pause() -> None:
    pause = {
        "drain": 1.0, "tail_copy": 2.0, "commit": 0.5, "first_token": None, "began_ms": 900.0,
    }  # fmt: skip
    fleet = replace(
        two_models(), moves=(move("a", "old", AT - 9), move("a", "new", AT, downtime_ms=pause))
    )
    line = last_move(fleet)
    assert "new of a: i0 → i1 committed 2.0 kB pause 3.5 ms" in line
    assert last_move(two_models()) == ""


def test_a_gpu_shows_who_has_it() -> None:
    gpu = LiveDevice(
        title="GPU 0",
        uuid="GPU-0",
        total_bytes=100,
        free_bytes=1,
        others_bytes=9,
        models={"a": 30, "unit u": 60},
        busy=0.5,
        watts=301.7,
    )
    (row,) = device_rows(replace(two_models(), devices=(gpu,)), "", SortOrder("GPU"))
    taken, power, whose = row.cells[1], row.cells[5:7], row.cells[7]
    assert (taken, power) == ("████████  99%", ("50%", "302 W"))
    assert whose == "unit u 60 B, a 30 B"
    assert row.look == "wait"


def test_a_gpu_of_a_worker_is_found_by_its_worker() -> None:
    here, there = (
        LiveDevice(title="GPU 0", uuid=f"GPU-{name}", total_bytes=2, free_bytes=1, worker=name)
        for name in ("", "node-1")
    )
    fleet = replace(two_models(), devices=(here, there))
    (row,) = device_rows(fleet, "node-1", SortOrder("GPU"))
    assert row.cells[0] == "node-1: GPU 0"


def test_the_whole_is_a_line() -> None:
    assert summary(two_models()) == "2 models · 2 of 2 instances serving · 2 streams · 1 GPU"
    much = LiveModel(name="a", state="starting", streams=700, held=3)
    fleet = replace(two_models(), models=(much,), unanswered=("a",), devices=())
    assert summary(fleet).endswith("700 streams (2 shown) · 3 held · no list of streams from a")


def test_a_stream_goes_to_instances_of_its_own_model_that_serve_the_emptiest_first() -> None:
    fleet = replace(
        two_models(),
        instances=(
            instance("a", "i0", 50),
            instance("a", "i1", 40),
            instance("a", "i2", 20),
            instance("a", "i3", state="draining"),
            instance("b", "i9"),
        ),
    )
    found = destinations(fleet, stream("a", "x", "i0"))
    assert [one.row.id for one in found] == ["i2", "i1"]


@pytest.mark.parametrize("names", [INSTANCE_SORTS, STREAM_SORTS, MOVE_SORTS, DEVICE_SORTS])
def test_every_order_is_reached_by_one_key_and_shows_the_same_rows(names: tuple[str, ...]) -> None:
    rows = {
        INSTANCE_SORTS: instance_rows,
        STREAM_SORTS: stream_rows,
        MOVE_SORTS: move_rows,
        DEVICE_SORTS: device_rows,
    }[names]
    fleet = replace(two_models(), moves=(move("a", "x"), move("b", "y", AT - 1)))
    order, seen = SortOrder(names[0]), []
    for _ in names:
        seen.append(order.by)
        assert {row.key for row in rows(fleet, "", order)} == {
            row.key for row in rows(fleet, "", order._replace(reverse=True))
        }
        order = next_sort(order, names)
    assert sorted(seen) == sorted(names)
    assert order.by == names[0]


# -- text of others


def test_a_name_with_control_characters_is_shown_without_them() -> None:
    assert plain("a\x1b[2Jb\nc\u202ed") == "a\ufffd[2Jb\ufffdc\ufffdd"


def test_markup_in_a_name_is_text_like_any_other() -> None:
    assert plain("[red]a[/red]") == "[red]a[/red]"


@given(st.text(max_size=400), st.integers(5, 60))
def test_any_text_becomes_one_printable_line_of_bounded_length(text: str, most: int) -> None:
    for shown in (plain(text, most), middle(text, most)):
        assert len(shown) <= most
        assert shown.isprintable()


def test_a_long_id_keeps_both_ends() -> None:
    assert middle("cmpl-0123456789abcdef", 11) == "cmpl-…bcdef"


@given(st.floats(allow_nan=False))
def test_a_bar_is_as_wide_as_it_is_whatever_it_shows(part: float) -> None:
    assert len(bar(part, 8)) == 8
