"""Starts of deployments that fail in the fleet's init: nothing of them is left."""

from __future__ import annotations

from pathlib import Path

from kvmig.fleet.orders import StartDeployment
from kvmig.fleet.settings import FleetSettings
from tests.support.init_site import InitSite


def start(log: Path) -> StartDeployment:
    """A start that is refused: this fleet runs no commands."""
    return StartDeployment("d1", "", (), "", str(log), "command")


def files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_a_start_whose_log_can_not_be_written_keeps_no_file_open(tmp_path: Path) -> None:
    """It is tried again and again, and init lives long."""
    with InitSite(FleetSettings(data=str(tmp_path / "fleet"))) as init:
        await init.run(start(tmp_path / "no-such-folder" / "log"))
        before = files()
        await init.run(start(tmp_path / "no-such-folder" / "log"))
        assert (files(), init.deployments) == (before, [])


async def test_a_deployment_whose_socket_stays_has_ended_all_the_same(tmp_path: Path) -> None:
    settings = FleetSettings(data=str(tmp_path / "fleet"))
    with InitSite(settings) as init:
        settings.deployment("d1").mkdir()  # as on a disk that has become read-only
        await init.run(start(tmp_path / "log"))
        assert init.deployments == []
