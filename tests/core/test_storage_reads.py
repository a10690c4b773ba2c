"""Reads of files whose storage may never answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmig.core.read_progress import note_path
from kvmig.core.storage_reads import StorageReads, StorageSilent
from tests.support.hung_files import HungFile, readers, until_readers


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[HungFile]:
    made = HungFile(tmp_path / "config.json")
    yield made
    made.release()


async def test_a_read_gives_its_value_or_its_error(tmp_path: Path) -> None:
    reads = StorageReads()
    assert await reads.read("model a", str(tmp_path), lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        await reads.read("model a", str(tmp_path), (tmp_path / "none").read_bytes)


async def test_a_read_that_hangs_is_given_up_by_its_owner_and_file_while_the_loop_turns(
    hung: HungFile,
) -> None:
    reads = StorageReads(silent_s=0.3)
    reading = asyncio.create_task(reads.read("model a", str(hung.path.parent), hung.read))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0.01)
    words = f"model a: {hung.path} can't be read: its storage does not answer within 0.3 s"
    with pytest.raises(StorageSilent, match=words):
        await reading
    assert turns > 5


async def test_what_hangs_is_not_read_once_more_until_it_answers(hung: HungFile) -> None:
    reads, folder = StorageReads(silent_s=0.2), str(hung.path.parent)
    for _ in range(3):
        with pytest.raises(StorageSilent, match="model a"):
            await reads.read("model a", folder, hung.read)
    assert readers() == 1
    hung.answer(b"7")
    await until_readers(0)
    assert await reads.read("model a", folder, hung.read) == b"7"


async def test_a_read_that_goes_on_is_not_given_up(tmp_path: Path) -> None:
    def read() -> str:
        for part in range(6):
            note_path(tmp_path / str(part))
            time.sleep(0.3)
        return "all"

    assert await StorageReads(silent_s=1.0).read("model a", str(tmp_path), read) == "all"


async def test_reads_that_hang_take_no_more_than_their_number_of_threads(tmp_path: Path) -> None:
    files = [HungFile(tmp_path / f"{at}.json") for at in range(3)]
    reads = StorageReads(most=2, silent_s=0.2)
    for file in files[:2]:
        with pytest.raises(StorageSilent, match=f"{file.path} can't be read"):
            await reads.read("model a", str(file.path), file.read)
    with pytest.raises(StorageSilent, match="2 other reads wait for storage that does not answer"):
        await reads.read("model b", str(files[2].path), files[2].read)
    assert readers() == 2
    files[0].answer()
    await until_readers(1)
    assert await reads.read("model b", str(tmp_path), lambda: 1) == 1
    for file in files:
        file.release()


async def test_one_whose_caller_has_gone_gives_its_place_back(hung: HungFile) -> None:
    reads = StorageReads(most=1, silent_s=5.0)
    reading = asyncio.create_task(reads.read("model a", "", hung.read))
    await until_readers(1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    hung.answer()
    assert await reads.read("model a", "", lambda: 1) == 1


def test_a_read_that_hangs_keeps_no_process_from_ending(hung: HungFile) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from kvmig.core.storage_reads import StorageReads\n"
        "read = StorageReads(silent_s=0.1).read('model a', '/m', Path(sys.argv[1]).read_bytes)\n"
        "asyncio.run(read)\n"
    )
    words = [sys.executable, "-c", program, str(hung.path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "StorageSilent: model a: /m can't be read" in done.stderr
