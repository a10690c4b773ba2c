"""What `kvmig worker` prints of workers, and which labels it takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from kvmig.cli.client import CallFailure
from kvmig.cli.workers import (
    drain_text,
    label_of,
    standing,
    wait_until_drained,
    worker_row,
    worker_view,
)
from kvmig.core.errors import ConfigError
from kvmig.fleet.worker_drain import InstanceOnWorker
from kvmig.fleet.workers import FleetWorker
from kvmig.fleet.workers_api import worker_json
from kvmig.launcher.node_files import FolderReport, NodeFilesReport
from tests.support.made_up_nodes import GIB

BUSY = InstanceOnWorker(
    model="a", instance="i0", state="draining", streams=64, kv_bytes=41_000_000_000,
    bytes_per_s=6e9,
)  # fmt: skip


def shown(*instances: InstanceOnWorker, **more: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "node": "n", "address": "10.0.0.1", "state": "ready", "memory_total": 8 * GIB,
        "memory_free": 4 * GIB,
    }  # fmt: skip
    return worker_json(FleetWorker("left", **{**usual, **more}), list(instances), 1000.0)


def test_a_worker_is_a_row() -> None:
    one = shown(BUSY, labels={"zone": "east"}, cordoned=True)
    name, state, instances, memory, gpus, address, labels = worker_row(one)
    assert (name, state, instances, gpus) == ("left", "ready, cordoned", 1, None)
    assert (memory, address, labels) == ("4.3 GB of 8.6 GB", "10.0.0.1", "zone=east")


def test_a_drain_says_how_much_is_left_and_how_long_it_takes() -> None:
    one = shown(BUSY, drained_at=990.0, drain_until=1020.0, cordoned=True)
    assert standing(one) == "draining"
    assert drain_text(one["drain"]) == (
        "draining, since 1970-01-01 00:16:30+00:00, until 1970-01-01 00:17:00+00:00: 64 streams,"
        " 41.0 GB, about 6.8 s"
    )
    assert "  a i0  draining, 64 streams" in worker_view(one)


def test_an_empty_worker_is_drained_and_a_lost_one_says_so_too() -> None:
    assert standing(shown(drained_at=990.0)) == "drained"
    assert standing(shown(drained_at=990.0, state="lost", why="gone")) == "drained, lost"


def test_a_drain_is_waited_for_until_nothing_is_left() -> None:
    views = iter([shown(BUSY, drained_at=990.0), shown(drained_at=990.0)])
    pauses: list[float] = []
    found = wait_until_drained(lambda: next(views), 60.0, lambda: 0.0, pauses.append)
    assert (found["drain"]["state"], pauses) == ("drained", [1.0])


def test_a_drain_is_waited_for_while_the_server_is_away_for_a_moment() -> None:
    away = CallFailure("no fleet answers"), CallFailure("the server is not there", 503)
    views: Iterator[CallFailure | dict[str, Any]] = iter([*away, shown(drained_at=990.0)])

    def look() -> dict[str, Any]:
        if isinstance(found := next(views), CallFailure):
            raise found
        return found

    assert wait_until_drained(look, 60.0, lambda: 0.0, lambda _: None)["name"] == "left"


@pytest.mark.parametrize(("status", "seconds"), [(403, 0.0), (None, 9.0)])
def test_a_drain_is_not_waited_for_without_the_right_key_or_for_ever(
    status: int | None, seconds: float
) -> None:
    times = iter([0.0, seconds, seconds])

    def look() -> dict[str, Any]:
        raise CallFailure("not here", status)

    with pytest.raises(CallFailure, match="not here"):
        wait_until_drained(look, 5.0, lambda: next(times), lambda _: None)


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (shown(BUSY, drained_at=990.0), "left is not drained after 5 s: 64 streams"),
        (shown(BUSY), "the drain of left was undone"),
    ],
)
def test_a_drain_that_does_not_end_in_time_fails(view: dict[str, Any], words: str) -> None:
    seconds = itertools.count(0.0, 3.0)
    with pytest.raises(CallFailure, match=words):
        wait_until_drained(lambda: view, 5.0, lambda: next(seconds), lambda _: None)


def test_an_instance_that_stays_says_why() -> None:
    stays = InstanceOnWorker(model="a", instance="i0", state="serving", stays="no room")
    assert "  a i0  serving, 0 streams: no room" in worker_view(shown(stays, drained_at=1.0))


def test_the_files_of_a_worker_are_shown_with_bytes_seconds_and_what_is_wrong() -> None:
    whole = FolderReport(
        folder="/f/whole/a-1", source="hf:Org/a", state="whole", size=4_000_000, done=4_000_000,
        took_s=2.5,
    )  # fmt: skip
    full = "its files can't be downloaded: the disk is too full: 9 bytes are needed, 5 are free"
    failed = FolderReport(folder="/f/whole/b-2", state="failed", why=full)
    files = NodeFilesReport(root="/f", free_bytes=10**12, folders=(whole, failed))
    forks = {"toy": "ready", "vllm": "loading"}
    view = shown(files=files, engines=("toy", "vllm"), fork_servers=forks)
    lines = worker_view(view).splitlines()
    assert "engines   toy, vllm" in lines
    assert "forks     toy: ready; vllm: loading" in lines
    assert "files     4.0 MB in /f; 1000.0 GB of the disk are free" in lines
    assert "  hf:Org/a  4.0 MB, downloaded in 2.5 s" in lines
    assert f"  b-2  {full}" in lines
    unusable = NodeFilesReport(why="/f can't be used for models' files: it is in use")
    assert "files     /f can't be used for models' files: it is in use" in worker_view(
        shown(files=unusable)
    )


@pytest.mark.parametrize(
    ("text", "label"),
    [("zone=east", ("zone", "east")), ("zone=", ("zone", "")), ("zone-", ("zone", None)),
     ("a=b=c", ("a", "b=c"))],
)  # fmt: skip
def test_labels_are_set_and_removed(text: str, label: tuple[str, str | None]) -> None:
    assert label_of(text) == label


@pytest.mark.parametrize("text", ["zone", "=east", "-"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be NAME=VALUE, or NAME- to remove it"):
        label_of(text)
