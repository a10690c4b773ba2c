"""Starts on one GPU come one after the other, also those of other launchers."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvmig.core.errors import StartupError
from kvmig.process import device_turns
from kvmig.process.device_turns import DeviceTurn, take_turn

S = 5.0


def always() -> bool:
    return True


async def free(folder: Path, *uuids: str, alone: bool = True) -> bool:
    """Whether a start could begin there now."""
    try:
        (await take_turn(uuids, 0.05, alone=lambda: alone, folder=folder)).end()
    except StartupError:
        return False
    return True


async def turn(folder: Path, *uuids: str, alone: bool = True) -> DeviceTurn:
    return await take_turn(uuids, S, alone=lambda: alone, folder=folder)


async def test_one_that_measures_is_alone_on_its_gpu(tmp_path: Path) -> None:
    first = await turn(tmp_path, "a")
    assert not await free(tmp_path, "a")
    assert not await free(tmp_path, "a", alone=False)
    assert await free(tmp_path, "b")

    first.end()
    first.end()
    assert await free(tmp_path, "a")


async def test_those_that_do_not_measure_start_side_by_side(tmp_path: Path) -> None:
    first = await turn(tmp_path, "a", alone=False)
    assert await free(tmp_path, "a", alone=False)
    assert not await free(tmp_path, "a")
    first.end()


async def test_one_that_needs_not_measure_after_all_lets_others_in(tmp_path: Path) -> None:
    first = await turn(tmp_path, "a")
    first.share()
    assert await free(tmp_path, "a", alone=False)
    assert not await free(tmp_path, "a")
    first.end()


async def test_a_turn_on_several_gpus_is_had_of_all_or_of_none(tmp_path: Path) -> None:
    other = await turn(tmp_path, "b")
    assert not await free(tmp_path, "a", "b")
    assert await free(tmp_path, "a")
    other.end()


async def test_two_that_want_the_same_gpus_in_another_order_do_not_wait_for_ever(
    tmp_path: Path,
) -> None:
    async def take(*uuids: str) -> None:
        for _ in range(10):
            one = await turn(tmp_path, *uuids)
            await asyncio.sleep(0)
            one.end()

    async with asyncio.timeout(30):
        await asyncio.gather(take("a", "b"), take("b", "a"))


async def test_who_waits_says_so_once_and_has_its_turn_when_the_holder_is_killed(
    tmp_path: Path,
) -> None:
    code = (
        "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(60)"
    )
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "gpu-a"), stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    said: list[bool] = []
    waiting = asyncio.create_task(
        take_turn(["a"], S, alone=always, folder=tmp_path, on_wait=lambda: said.append(True))
    )
    await asyncio.sleep(3 * device_turns.LOOK_S)
    assert not waiting.done()
    holder.kill()
    (await waiting).end()
    await holder.wait()
    assert said == [True]


async def test_one_that_waits_too_long_names_the_gpu(tmp_path: Path) -> None:
    first = await turn(tmp_path, "a")
    with pytest.raises(StartupError, match=r"another start on GPU a has taken more than 0\.1 s"):
        await take_turn(["a"], 0.1, alone=always, folder=tmp_path)
    first.end()


async def test_one_that_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    first = await turn(tmp_path, "b")
    waiting = asyncio.create_task(turn(tmp_path, "a", "b"))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await free(tmp_path, "a")
    first.end()


async def test_a_folder_that_others_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"kvmig-{os.getuid()}"
    (await take_turn(["a"], S, alone=always)).end()
    folder.chmod(0o777)
    with pytest.raises(StartupError, match="that only this user may open"):
        await take_turn(["a"], S, alone=always)
