"""`kvmig run NAME` at a terminal: from a catalogue on a web server to an answer."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Self

import pytest

from tests.support.catalogue_site import ONE, CatalogueSite
from tests.support.fleets import ToyFleet, ended, kill
from tests.support.model_hub import ModelHub, small_model
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

NAME, SIZE, HELD = "Org/Small-1B", 8_000_000, 4_000_000
READ = 3_000_000
"""Bytes that are on the disk by then; the last ones before are on their way."""
BYTES = re.compile(r"(\d+\.\d)/8\.0 MB")
LEFT = re.compile(r"\d:\d\d:\d\d")
INTERRUPT = b"\x03"
CLEARED = "\x1b[2K"
"""What a terminal gets that takes a line away."""


class TerminalRun:
    """A command at a terminal of its own, which is read until the end of the block."""

    def __init__(self, *words: str) -> None:
        self.text = ""
        self._own, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-m", "kvmig", *words],  # Ctrl-C is the terminal's
            stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "COLUMNS": "150", "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._own)

    def read_until(self, shown: re.Pattern[str], times: int = 1) -> None:
        """Read until so many different texts of a pattern were there."""
        deadline = time.monotonic() + PATIENCE_S
        while len(set(shown.findall(self.text))) < times:
            assert time.monotonic() < deadline, self.text
            assert self._read(), self.text

    def type(self, keys: bytes) -> None:
        os.write(self._own, keys)

    def end(self) -> int:
        """Read the rest; the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < deadline, self.text
        return self._process.wait(10)

    def _read(self) -> bool:
        """Whether there may be more."""
        ready, _, _ = select.select([self._own], [], [], 0.5)
        if not ready:
            return True
        try:
            data = os.read(self._own, 1 << 16)
        except OSError:  # nobody has the other end any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)


@pytest.fixture(scope="module")
def hub() -> Iterator[ModelHub]:
    with ModelHub() as made:
        made.add(NAME, small_model(SIZE))
        yield made


@pytest.fixture(scope="module")
def fleet(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    folder = tmp_path_factory.mktemp("site")
    body = ONE.replace("hf:org/small", f"hf:{NAME}").encode()
    with pytest.MonkeyPatch.context() as patched, CatalogueSite(folder, body) as site:
        patched.setenv("HF_ENDPOINT", hub.url)
        patched.setenv("HF_HUB_OFFLINE", "0")
        patched.setenv("SSL_CERT_FILE", site.trusted)
        where = f"--catalogue=https://{site.place}"
        with ToyFleet(tmp_path_factory.mktemp("fleet"), where) as made:
            yield made


def terminal(fleet: ToyFleet, *words: str) -> TerminalRun:
    return TerminalRun(f"--data={fleet.folder}", *words)


def megabytes(text: str) -> list[float]:
    return [float(one) for one in BYTES.findall(text)]


def test_a_run_shows_bytes_and_time_left_and_goes_on_where_ctrl_c_and_a_kill_have_left_it(
    fleet: ToyFleet, hub: ModelHub
) -> None:
    with terminal(fleet, "model", "search", "small") as search:
        assert search.end() == 0
        assert f"hf:{NAME}" in search.text

    hub.faults.pause_s, hub.faults.hold_after = 0.02, HELD
    run = ("run", "small", "Count: 0017 0018", "--engine=toy", "--max-tokens=5")
    with terminal(fleet, *run) as first:
        first.read_until(BYTES, times=4)
        first.read_until(LEFT)
        first.type(INTERRUPT)
        assert first.end() == 130, first.text
    shown = megabytes(first.text)
    assert shown == sorted(shown)
    assert f"kvmig: small is hf:{NAME}" in first.text
    assert "kvmig: the fleet goes on with the download" in first.text
    wait_until(lambda: fleet.get("models/small")["files"]["done"] >= READ)

    (fetcher,) = fleet.processes("kvmig.sources.fetcher")
    kill(fetcher)
    wait_until(lambda: ended(fetcher))
    hub.faults.hold_after = None
    hub.faults.held.set()
    with terminal(fleet, *run) as second:
        assert second.end() == 0, second.text
    assert min(megabytes(second.text)) >= READ / 1e6 - 0.1
    assert second.text.rpartition(CLEARED)[2].strip(), "the answer follows the bar"
    first_range, *_, last_range = hub.downloads("model.safetensors")
    assert first_range == ""
    assert int(last_range.removeprefix("bytes=").rstrip("-")) > 0
    assert hub.sent < SIZE * 1.2
