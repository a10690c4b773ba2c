"""What calls use isn't lost with a full disk."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvmig.accounts.usage import HAND_OVER, RESERVE_BYTES, HandOver, UsageRecord, UsageSpool
from kvmig.asgi.call import HttpCall
from kvmig.core.background import cancel_tasks
from kvmig.frontend import usage_writer
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.usage_writer import UsageWriter
from tests.support.waiting import PATIENCE_S, until


class Disk:
    """Takes records, unless it is full."""

    def __init__(self) -> None:
        self.full = True
        self.needs_reserve = False
        self.reserve: Path | None = None


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made, write = Disk(), UsageSpool.write

    def or_full(self: UsageSpool, records: list[UsageRecord]) -> None:
        held = made.reserve is not None and made.reserve.exists()
        if made.full and (made.reserve is None or held):
            raise OSError("no room is left")
        write(self, records)

    monkeypatch.setattr(UsageSpool, "write", or_full)
    return made


class Now:
    """A clock."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def call_of(writer: UsageWriter[UsageMeter]) -> HttpCall:
    """A call that is over."""
    call = HttpCall("c", "k")
    writer.meter.enter(call)
    call.end_call()
    return call


def writer_in(folder: Path, server: str = "", now: Now | None = None) -> UsageWriter[UsageMeter]:
    meter = UsageMeter("a", lambda: 1.0)
    return UsageWriter(meter, folder / "front-1.sqlite", server, now or Now())


def kept(folder: Path) -> int:
    return len(UsageSpool(folder / "front-1.sqlite").read())


@asynccontextmanager
async def server(path: Path, answers: bool = True) -> AsyncIterator[list[HandOver]]:
    """Who takes records."""
    taken: list[HandOver] = []
    tasks: list[asyncio.Task[None] | None] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        while line := await reader.readline():
            if not answers:
                break
            taken.append(msgspec.json.decode(line.removeprefix(HAND_OVER), type=HandOver))
            writer.write(HAND_OVER + b"\n")
        writer.close()
        await writer.wait_closed()

    serving = await asyncio.start_unix_server(connected, str(path))
    yield taken
    serving.close()
    await asyncio.gather(*(task for task in tasks if task is not None))


async def test_what_the_disk_does_not_take_goes_to_the_server(tmp_path: Path, disk: Disk) -> None:
    async with server(tmp_path / "s") as taken:
        writer = writer_in(tmp_path, str(tmp_path / "s"))
        for _ in range(450):
            call_of(writer)
        await writer.write()
    assert [(one.source, len(one.records)) for one in taken] == [
        ("front-1", 200), ("front-1", 200), ("front-1", 50),
    ]  # fmt: skip
    assert writer.refusal() == ""
    disk.full = False
    await writer.write()
    assert kept(tmp_path) == 0


async def test_what_nobody_takes_is_kept_and_calls_are_refused_until_it_is_written(
    tmp_path: Path, disk: Disk
) -> None:
    now = Now()
    async with server(tmp_path / "s", answers=False):
        writer = writer_in(tmp_path, str(tmp_path / "s"), now)
        call_of(writer)
        await writer.write()
        now.at += usage_writer.PATIENCE_S
        assert writer.refusal() == ""
        now.at += 0.1
        assert writer.refusal() == "what calls use can't be kept (no room is left), try again"
        disk.full = False
        await writer.write()
        assert writer.refusal() == ""
    assert kept(tmp_path) == 1


async def test_no_more_counts_wait_than_there_is_room_for(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_writer, "MOST", 2)
    writer = writer_in(tmp_path)
    for _ in range(3):
        call_of(writer)
    await writer.write()
    assert "can't be kept" in writer.refusal()


async def test_the_last_records_have_room_in_reserve(tmp_path: Path, disk: Disk) -> None:
    writer = writer_in(tmp_path)
    UsageSpool(tmp_path / "front-1.sqlite").reserve()
    disk.reserve = tmp_path / "front-1.reserve"
    assert disk.reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    call_of(writer)
    await writer.write()
    await writer.close()
    assert kept(tmp_path) == 1
    assert not disk.reserve.exists()


async def test_what_is_lost_in_the_end_is_said_with_its_number(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(usage_writer, "LAST_S", -1.0)
    writer = writer_in(tmp_path)
    for _ in range(3):
        call_of(writer).told = None
    with caplog.at_level(logging.ERROR):
        await writer.close()
    assert "usage of 3 calls, 0 tokens, is lost: no room is left" in caplog.text


async def test_a_slow_reserve_keeps_no_count_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_writer, "WRITE_S", 0.01)
    free = threading.Event()
    monkeypatch.setattr(UsageSpool, "reserve", lambda spool: free.wait(PATIENCE_S))
    writer = writer_in(tmp_path)
    call_of(writer)
    running = asyncio.create_task(writer.run())
    try:
        await until(lambda: kept(tmp_path) == 1)
    finally:
        free.set()
        await cancel_tasks(running)


async def test_what_a_cancelled_write_has_begun_with_comes_before_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, begun, free, written = UsageSpool.write, threading.Event(), threading.Event(), [0]

    def first_is_slow(self: UsageSpool, records: list[UsageRecord]) -> None:
        if not begun.is_set():
            begun.set()
            free.wait(PATIENCE_S)
        write(self, records)
        written[0] += 1

    monkeypatch.setattr(UsageSpool, "write", first_is_slow)
    writer = writer_in(tmp_path)
    call = HttpCall("c", "k")
    writer.meter.enter(call)
    writing = asyncio.create_task(writer.write())
    await until(begun.is_set)
    await cancel_tasks(writing)  # its thread goes on
    call.end_call()
    threading.Timer(0.2, free.set).start()
    await writer.close()
    await until(lambda: written == [2])
    (record,) = UsageSpool(tmp_path / "front-1.sqlite").read()
    assert record.ended is not None
