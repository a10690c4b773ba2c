"""`vllm serve` with the plugin and flags with which it is refused by name at its start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmig.models import BUNDLED
from kvmig_tools.served import SMALL
from tests.support.plugin_server import COMMAND, plugin_environment

pytestmark = [pytest.mark.server, pytest.mark.long]

REFUSED_S = 240.0
BAD_FLAGS = 2


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--headless"], "--headless can't be used: kvmig starts front end and instances"),
        (
            ["--data-parallel-hybrid-lb"],
            "--data-parallel-hybrid-lb can't be used: kvmig runs whole",
        ),
        (["--enable-sleep-mode"], "--enable-sleep-mode can't be used: vLLM gives back"),
    ],
    ids=["headless", "hybrid-lb", "sleep"],
)
def test_a_server_is_refused_by_name_before_anything_is_loaded_with(
    tmp_path: Path, flags: list[str], why: str
) -> None:
    words = [str(BUNDLED), *SMALL, "--data-parallel-size=2", *flags]
    done = subprocess.run(
        [sys.executable, *COMMAND, *words],
        env={**os.environ, **plugin_environment(tmp_path)},
        capture_output=True, text=True, timeout=REFUSED_S, check=False,
    )  # fmt: skip

    said = [line for line in done.stderr.splitlines() if line.startswith("kvmig: ")]
    assert done.returncode == BAD_FLAGS, done.stderr
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"kvmig: {why}")
