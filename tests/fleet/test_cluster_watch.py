"""The process that watches a Ray cluster, as the server has it: its reports, its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from kvmig.core.background import cancel_tasks
from kvmig.fleet import cluster_watch
from kvmig.fleet.cluster_watch import ClusterWatch
from kvmig.launcher.node_files import ClusterWish, FilesWish, wish_of
from kvmig.launcher.node_reports import ClusterReport, encode_report, report_of
from tests.support.made_up_nodes import cluster_of, made_up_node
from tests.support.waiting import until

REPORT = cluster_of(made_up_node("a"))
LINE = encode_report(REPORT)


def test_a_report_is_read_as_it_was_written() -> None:
    assert report_of(LINE) == REPORT


class WatchBench:
    """A watch of a process that runs a program in place of the real one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
        (folder / "made_up_watch.py").write_text(f"import sys, time\n{program}\n")
        monkeypatch.setenv("PYTHONPATH", f"{folder}:{':'.join(sys.path)}")
        monkeypatch.setattr(cluster_watch, "MODULE", "made_up_watch")
        monkeypatch.setattr(cluster_watch, "AGAIN_S", 0.01)
        self.taken: list[ClusterReport | None] = []
        self.wish = ClusterWish()
        watch = ClusterWatch("auto", self.taken.append, lambda: self.wish)
        self.task = asyncio.create_task(watch.run())


async def test_its_reports_are_taken_and_it_ends_with_its_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = tmp_path / "ended"
    program = (
        f"sys.stdout.buffer.write({LINE!r}); sys.stdout.flush()\n"
        f"sys.stdin.read(); open({str(end)!r}, 'w').close()"
    )
    bench = WatchBench(tmp_path, monkeypatch, program)
    await until(lambda: bench.taken == [REPORT])
    await cancel_tasks(bench.task)
    assert end.exists()


async def test_it_reads_which_files_nodes_are_to_have_whenever_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = tmp_path / "read"
    program = f"""
import threading
def keep():
    for line in sys.stdin:
        open({str(read)!r}, "a").write(line)
threading.Thread(target=keep).start()
for _ in range(200):
    time.sleep(0.05); sys.stdout.buffer.write({LINE!r}); sys.stdout.flush()
"""
    bench = WatchBench(tmp_path, monkeypatch, program)
    await until(lambda: len(bench.taken) > 3)
    bench.wish = ClusterWish(common=FilesWish(root="/files"))
    await until(lambda: read.read_text().count("\n") == 2)
    await cancel_tasks(bench.task)
    first, second = read.read_text().splitlines()
    assert wish_of(first.encode()) == ClusterWish()
    assert wish_of(second.encode()) == bench.wish


async def test_one_that_ends_or_says_what_nobody_reads_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = WatchBench(tmp_path, monkeypatch, "print('what')")
    await until(lambda: len(bench.taken) > 1)
    assert set(bench.taken) == {None}
    await cancel_tasks(bench.task)


async def test_one_that_hangs_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_watch, "SILENCE_S", 0.2)
    monkeypatch.setattr(cluster_watch, "END_S", 0.2)
    bench = WatchBench(tmp_path, monkeypatch, "time.sleep(60)")
    await until(lambda: bench.taken == [None, None])
    await cancel_tasks(bench.task)
    assert "nothing was reported for 0.2 s" in caplog.text


async def test_a_cluster_that_can_not_be_joined_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = encode_report(ClusterReport(failed="no Ray cluster answers there"))
    program = f"sys.stdout.buffer.write({failed!r})"
    bench = WatchBench(tmp_path, monkeypatch, program)
    await until(lambda: len(bench.taken) > 1)
    await cancel_tasks(bench.task)
    said = [one.getMessage() for one in caplog.records if "not watched now" in one.getMessage()]
    assert said == ["the Ray cluster is not watched now: no Ray cluster answers there"]
