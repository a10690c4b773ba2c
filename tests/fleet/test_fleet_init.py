"""What init does beside processes: the sentences of those that ended, and their logs."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import tempfile
from pathlib import Path

import pytest

from kvmig.cli.client import check_url
from kvmig.core.errors import StartupError
from kvmig.fleet import process_logs, supervisor
from kvmig.fleet.orders import (
    CheckFlags,
    DeployedProgram,
    DeployedPrograms,
    FlagsChecked,
    StartDeployment,
    StepDown,
    StopDeployment,
)
from kvmig.fleet.process_logs import last_sentence, size_of, turn_log
from kvmig.fleet.settings import FleetSettings
from tests.support.inside import OwnSupervisor
from tests.support.waiting import until


def test_the_last_sentence_is_the_processs_own(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("kvmig: an older one\nvLLM's words\n")
    begin = size_of(log)
    assert last_sentence(log, begin) == ""
    with log.open("a") as file:
        file.write("kvmig: instance i0 starts\nWARNING x\nkvmig: not enough memory\nmore\n")
    assert last_sentence(log, begin) == "not enough memory"


def test_of_a_log_that_was_begun_anew_it_is_the_last_one(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("kvmig: the last\n")
    assert last_sentence(log, 10_000) == "the last"


@pytest.mark.parametrize("how", ["it takes too long", "init ends"])
async def test_a_check_of_flags_that_does_not_end_is_ended(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs: list[asyncio.subprocess.Process] = []

    class Hanging(OwnSupervisor):
        """A supervisor whose checks never end."""

        async def _forked(self, *_: object, **__: object) -> asyncio.subprocess.Process:
            hangs.append(await asyncio.create_subprocess_exec("sleep", "600", process_group=0))
            return hangs[0]

    monkeypatch.setattr(supervisor, "CHECK_S", 0.1 if how == "it takes too long" else 60)
    with socket.socket() as sock:
        one = Hanging(FleetSettings(data=str(tmp_path)), sock)
        checking = asyncio.create_task(one.check(CheckFlags("c", "toy", ())))
        await until(lambda: hangs)
        if how == "init ends":
            checking.cancel()
        await asyncio.wait([checking])
        async with asyncio.timeout(10):
            assert await hangs[0].wait() == -signal.SIGKILL


async def test_a_check_of_flags_that_finds_no_place_for_what_is_said_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server would wait for minutes, and would not know why."""

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with socket.socket() as sock:
        one = OwnSupervisor(FleetSettings(data=str(tmp_path)), sock)
        await one.check(CheckFlags("c", "toy", ()))
    why = "the flags can't be checked: [Errno 28] No space left on device"
    assert one.news == [FlagsChecked("c", why)]


def test_the_next_server_hears_of_a_deployment_that_is_just_being_forked() -> None:
    start = StartDeployment("d1", "toy", (), "a note", "/log")
    assert supervisor.running([supervisor.RunningDeployment(start)]) == DeployedPrograms(
        (DeployedProgram("d1", "toy", "a note", 0),)
    )


async def test_what_an_earlier_server_orders_is_not_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployed: list[str] = []

    class Noting(OwnSupervisor):
        """A supervisor that only notes what it is to start."""

        async def _deploy(self, start: StartDeployment) -> None:
            deployed.append(start.deployment)

    def start(name: str, term: int) -> StartDeployment:
        return StartDeployment(name, "toy", (), "", "/log", term=term)

    with socket.socket() as sock:
        one = Noting(FleetSettings(data=str(tmp_path)), sock)
        one.lead()
        one.carry_out(start("d1", 5))
        one.carry_out(StepDown("b:/data", leads=6, term=5))
        one.carry_out(start("d2", 5))
        one.carry_out(StopDeployment("d1", term=5))
        await until(lambda: deployed)
        await asyncio.sleep(0)
    assert deployed == ["d1"]
    assert "StartDeployment is not carried out: the order is of an earlier server" in caplog.text
    assert "StopDeployment is not carried out" in caplog.text


def test_a_command_of_the_catalogue_does_not_start_in_a_fleet_that_runs_none() -> None:
    settings = FleetSettings(data="/d")
    with pytest.raises(StartupError, match="this fleet runs no commands"):
        supervisor.module_of("command", settings)
    assert supervisor.module_of("unit", settings) == "kvmig.sharing.__main__"
    allowed = FleetSettings(data="/d", allow_commands=True)
    assert supervisor.module_of("command", allowed) == "kvmig.command.__main__"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8080"),
        ("fleet.lan", "http://fleet.lan:8080"),
        ("::", "http://[::]:8080"),
    ],
)
def test_the_url_of_a_fleet_is_one_that_its_own_command_takes(host: str, url: str) -> None:
    assert check_url(FleetSettings(data="/d", host=host).url) == url


def test_without_a_log_there_is_none(tmp_path: Path) -> None:
    assert last_sentence(tmp_path / "none.log", 0) == ""


def test_a_long_log_is_kept_once_and_begun_anew_for_who_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_logs, "LOG_BYTES", 10)
    log = tmp_path / "qwen2.5.log"
    with log.open("a") as file:
        file.write("a line that is long\n")
        file.flush()
        turn_log(log)
        file.write("next\n")
    assert log.read_text() == "next\n"
    assert (tmp_path / "qwen2.5.log.1").read_text() == "a line that is long\n"
    turn_log(log)
    assert log.read_text() == "next\n"
