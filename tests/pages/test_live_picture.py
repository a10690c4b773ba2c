"""The live picture: its parts, what differs between two, and the dots of streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.api_records import InstanceRow, RequestRow
from kvmig.core.live_records import (
    LiveDevice,
    LiveFleet,
    LiveInstance,
    LiveModel,
    LiveMove,
    LiveStream,
    MoveRecord,
)
from kvmig.pages.live_feed import changed, whole
from kvmig.pages.picture import MOST_DOTS, LivePicture, change_of, picture_of

GPU = "GPU 0 (NVIDIA H100, GPU-8f)"


def instance(name: str, model: str = "qwen", **more: Any) -> LiveInstance:
    row = {"state": "serving", "blocks_total": 100, **more}
    gpus = row.pop("gpus", ())
    worker = row.pop("worker", "local")
    return LiveInstance(
        model=model, deployment="d1", worker=worker, gpus=gpus, row=InstanceRow(id=name, **row)
    )


def streams(count: int, at: str, model: str = "qwen", first: int = 0) -> list[LiveStream]:
    return [
        LiveStream(
            model=model,
            deployment="d1",
            row=RequestRow(id=f"r{first + n}", instance=at, state="running", blocks=1),
        )
        for n in range(count)
    ]


def fleet(*instances: LiveInstance, **more: Any) -> LiveFleet:
    found = {"at": 0.0, "models": (LiveModel(name="qwen", state="serving"),), **more}
    return LiveFleet(instances=instances, **found)


def picture(*instances: LiveInstance, **more: Any) -> LivePicture:
    return picture_of(fleet(*instances, **more))


def test_instances_stand_on_their_gpus_and_workers() -> None:
    claims = {"qwen": 60}
    device = LiveDevice(title=GPU, uuid="u", total_bytes=80, free_bytes=20, models=claims)
    found = picture(
        instance("i1", gpus=(GPU,)),
        instance("i0", gpus=(GPU,)),
        instance("i2", worker="east"),
        devices=(device,),
    )
    east, local = found.workers
    assert [one.id for one in east.groups[0].instances] == ["i2"]
    (group,) = local.groups
    assert [one.id for one in group.instances] == ["i0", "i1"]
    assert (group.head.total, group.head.taken, group.head.claims) == (80, 60, (("qwen", 60),))


def test_a_gpu_without_an_instance_is_shown() -> None:
    device = LiveDevice(title=GPU, uuid="GPU-8f", total_bytes=80, free_bytes=80)
    (worker,) = picture(devices=(device,)).workers
    assert [(one.head.title, one.instances) for one in worker.groups] == [(GPU, ())]


def test_a_gpu_without_an_instance_is_shown_on_its_own_worker() -> None:
    devices = [
        LiveDevice(title=name, uuid=name, total_bytes=80, free_bytes=80, worker=worker)
        for name, worker in (("GPU-a0", "east"), ("GPU-b0", "west"), ("GPU-c0", ""))
    ]
    found = picture(instance("i0", worker="east", gpus=("GPU-a0",)), devices=tuple(devices))
    shown = {one.name: [group.head.title for group in one.groups] for one in found.workers}
    assert shown == {"east": ["GPU-a0"], "local": ["GPU-c0"], "west": ["GPU-b0"]}


@pytest.mark.parametrize(
    ("used", "total", "filled"), [(37, 100, 37), (0, 0, 0), (150, 100, 100), (1, 3, 33)]
)
def test_a_box_is_filled_to_the_use_of_its_kv_cache(used: int, total: int, filled: int) -> None:
    found = picture(instance("i0", blocks_used=used, blocks_total=total))
    assert found.workers[0].groups[0].instances[0].filled == filled


def test_nothing_differs_between_equal_pictures() -> None:
    one = picture(instance("i0"), streams=tuple(streams(5, "i0")))
    assert not change_of(one, picture(instance("i0"), streams=tuple(streams(5, "i0"))))


def test_a_box_that_differs_is_sent_alone() -> None:
    before = picture(instance("i0"), instance("i1"))
    change = change_of(before, picture(instance("i0", running=3), instance("i1")))
    assert change.regions == ()
    assert [one.id for one in change.instances] == ["i0"]


def test_a_new_instance_makes_the_region_again() -> None:
    change = change_of(picture(instance("i0")), picture(instance("i0"), instance("i1")))
    assert (change.regions, change.instances) == (("workers",), ())


def test_a_change_of_state_is_said() -> None:
    before = picture(models=(LiveModel(name="qwen", state="starting"),))
    change = change_of(before, picture(models=(LiveModel(name="qwen", state="serving"),)))
    assert change.said == ("qwen: serving",)
    assert [one.state for one in change.models] == ["serving"]


def test_a_stream_that_moves_keeps_its_dot() -> None:
    boxes = instance("i0"), instance("i1")
    before = picture(*boxes, streams=tuple(streams(1, "i0")))
    after = picture(*boxes, streams=tuple(streams(1, "i1")))
    (first, second) = before.dots
    assert before.dots[first] == after.dots[second] != ()
    assert change_of(before, after).dots == {first: (), second: before.dots[first]}


def test_an_id_of_a_dot_shows_nothing_of_its_call() -> None:
    (ids,) = picture(instance("i0"), streams=tuple(streams(1, "i0"))).dots.values()
    assert all(len(one) == 8 and int(one, 16) >= 0 for one in ids)


@given(st.integers(0, 1500), st.integers(0, 40))
def test_of_many_streams_a_sample_is_shown_that_stays_the_same(count: int, ended: int) -> None:
    every = streams(count, "i0")
    before = picture(instance("i0"), streams=tuple(every)).dots
    after = picture(instance("i0"), streams=tuple(every[ended:])).dots
    (was,), (now,) = before.values(), after.values()
    assert len(was) == min(count, MOST_DOTS)
    assert len(set(was) - set(now)) <= ended


def test_streams_of_an_instance_that_is_not_there_have_no_dot() -> None:
    found = picture(instance("i0"), streams=tuple(streams(3, "gone")))
    assert list(found.dots.values()) == [()]


def test_names_are_escaped_in_regions_and_parts() -> None:
    evil = "<img src=x onerror=alert(1)>"
    model = LiveModel(name=evil, state="waiting", why=evil)
    box = instance("i0", evil, detail=evil, state="failed")
    move = LiveMove(model=evil, move=MoveRecord(state="aborted", reason=evil))
    found = picture(box, models=(model,), moves=(move,))
    regions = whole(found)["regions"]
    assert isinstance(regions, dict)
    html = "".join(regions.values())
    before = picture(instance("i0", evil), models=(LiveModel(name=evil, state="zero"),))
    change = change_of(before, found)
    parts = changed(found, change)["parts"]
    assert isinstance(parts, dict)
    html += "".join(parts.values())
    assert "&lt;img" in html
    assert "<img" not in html


def test_the_pictures_of_many_models_and_moves_render() -> None:
    move = MoveRecord(
        source="i0", destination="i1", state="committed", bytes=5, total_ms=12.3,
        downtime_ms={"drain": 1.5, "first_token": None, "began_ms": 10.8},
    )  # fmt: skip
    found = picture(instance("i0"), moves=(LiveMove(model="qwen", move=move),))
    regions = whole(found)["regions"]
    assert isinstance(regions, dict)
    assert "from i0 to i1 in 12 ms, 1.5 ms without a token" in regions["moves"]
