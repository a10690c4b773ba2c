"""The API of a fleet's server, whatever is sent to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fleets import ToyFleet

pytestmark = [pytest.mark.server, pytest.mark.long]

FUZZ_S = 5
MOST_S = 120


def test_no_call_of_the_api_is_a_servers_error(tmp_path: Path) -> None:
    with ToyFleet(tmp_path) as fleet:
        done = subprocess.run(
            [
                Path(sys.executable).parent / "schemathesis",
                "run",
                f"{fleet.url}/kvmig/v2/openapi.json",
                f"--header=Authorization: Bearer {fleet.key}",
                "--exclude-path=/kvmig/v2/backup",  # it writes files
                "--checks=not_a_server_error",
                "--phases=coverage,fuzzing",
                f"--max-time={FUZZ_S}",
                "--seed=1",
                "--no-color",
                "--generation-database=:memory:",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=MOST_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        chosen = re.search(r"Selected: (\d+)/(\d+)", done.stdout)
        assert chosen is not None
        assert int(chosen[1]) == int(chosen[2]) - 1
        assert fleet.get("status")["proxies"] == 1
