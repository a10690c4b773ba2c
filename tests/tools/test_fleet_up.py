"""A fleet that benchmarks and tests start."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvmig.core.errors import StartupError
from kvmig_tools import fleet
from kvmig_tools.fleet import FleetUp


@pytest.mark.long
def test_nothing_is_left_of_a_fleet_that_does_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "START_S", 0.2)
    made = FleetUp(tmp_path)
    with pytest.raises(StartupError):
        made.start()
    left = [one for one in psutil.process_iter() if names(one, str(made.folder))]
    for one in left:
        one.kill()
    assert not left


def names(process: psutil.Process, folder: str) -> bool:
    """Whether its command line has the folder."""
    try:
        return any(folder in word for word in process.cmdline())
    except psutil.Error:
        return False
