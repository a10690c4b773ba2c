"""A fleet on a machine where an engine can't be forked: that is found once, and flags are checked
without it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from kvmig.core.errors import StartupError
from kvmig.fleet import supervisor
from kvmig.fleet.orders import CheckFlags, FlagsChecked, StartDeployment
from kvmig.fleet.settings import FleetSettings, environment_of, make_folders
from kvmig.launcher.fork_servers import ForkServers
from kvmig.models import BUNDLED
from kvmig.process.fork_server import HANDED, NO_FORKS, CannotFork, ForkServerPool
from tests.support.inside import OwnSupervisor, fork_server_process

ROOT = Path(__file__).parent.parent.parent
TICKS = """
import sys, _thread, time
if "kvmig.launcher.shared_fork_server" in sys.orig_argv:
    _thread.start_new_thread(time.sleep, (600,))
"""
"""A library that starts a thread wherever a nursery loads, which `threading` doesn't know."""
CHECKED_S = 1.0
"""What `kvmig model add` may take where nothing is loaded."""
VLLM = ("--instances=1", str(BUNDLED))
THREADS = "loading has started 2 threads"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetSettings:
    """Of a fleet on such a machine."""
    library = tmp_path / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(TICKS)
    monkeypatch.setenv("PYTHONPATH", f"{library}{os.pathsep}{ROOT}")
    made = FleetSettings(data=str(tmp_path / "fleet"))
    make_folders(made)
    return made


async def check(init: OwnSupervisor, engine: str, *words: str) -> tuple[str, float]:
    """Return what is wrong with flags for an engine, and the time that it takes to say so."""
    began = time.monotonic()
    await init.check(CheckFlags("c", engine, words))
    (news,) = init.news
    init.news.clear()
    assert isinstance(news, FlagsChecked)
    return news.wrong, time.monotonic() - began


@pytest.fixture
async def init(settings: FleetSettings) -> AsyncIterator[OwnSupervisor]:
    with socket.socket() as sock:
        made = OwnSupervisor(settings, sock)
        await made.load_forks()  # the fleet's server comes of them
        yield made
        await made.close_forks()


async def test_a_nursery_that_cannot_fork_is_started_once_and_says_why(
    settings: FleetSettings,
) -> None:
    nurseries = ForkServers(settings.fork_server, partial(environment_of, settings))
    with pytest.raises(CannotFork, match=r"toy can't be forked.*1 threads: python"):
        await nurseries.server("toy")
    started = fork_server_process(nurseries, "toy")
    async with asyncio.timeout(10):
        assert await started.wait() == 2

    with pytest.raises(CannotFork, match="1 threads: python"):
        await nurseries.server("toy")

    assert fork_server_process(nurseries, "toy") is started
    await nurseries.close()


async def test_a_nursery_that_fails_otherwise_is_started_again(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    nurseries = ForkServers(settings.fork_server, partial(environment_of, settings))
    monkeypatch.setenv("PYTHONHOME", "/no")
    with pytest.raises(StartupError, match="has failed"):
        await nurseries.server("toy")
    monkeypatch.delenv("PYTHONHOME")
    (Path(settings.data).parent / "library" / "sitecustomize.py").unlink()

    assert not (await nurseries.server("toy")).gone
    await nurseries.close()


async def test_flags_are_checked_within_a_second_where_vllm_is_loaded_nowhere(
    init: OwnSupervisor,
) -> None:
    init.never_forks("vllm", THREADS)

    good, quick_s = await check(
        init, "vllm", *VLLM, "--max-model-len=256", "--no-enable-log-requests"
    )
    unknown, _ = await check(init, "vllm", *VLLM, "--no-such-flag=1")
    refused, _ = await check(init, "vllm", *VLLM, "--headless")
    absent, _ = await check(init, "vllm", *VLLM, "--load-format=tensorizer")
    missing, _ = await check(init, "vllm", "--instances=1", "/no/model")
    ours, _ = await check(init, "vllm", str(BUNDLED), "--instances=no")

    assert (good, quick_s < CHECKED_S) == ("", True)
    assert unknown == "--no-such-flag=1 can't be used: vLLM has no such flag"
    assert "--headless can't be used" in refused
    assert absent.startswith("--load-format is tensorizer, must be auto")
    assert missing.startswith("MODEL is /no/model, must be a folder")
    assert "--instances" in ours


async def test_a_deployment_there_starts_no_fork_server_of_its_own(
    init: OwnSupervisor, settings: FleetSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handed: list[str] = []

    async def by_itself(
        module: str, words: object, environment: dict[str, str], *_: object
    ) -> asyncio.subprocess.Process:
        handed.append(environment[HANDED])
        return await asyncio.create_subprocess_exec("true")

    monkeypatch.setattr(supervisor, "by_itself", by_itself)
    init.never_forks("toy", THREADS)
    await init.deploy(StartDeployment("d", "toy", (), "", str(tmp_path / "log")))
    assert handed == [NO_FORKS]

    pool = ForkServerPool("toy", os.environ, NO_FORKS)
    assert not pool.suits(os.environ)
    pool.renew("")
    await pool.loaded()
    pool.close()
