"""`vllm serve` with the plugin and flags of each verdict, on real vLLM: requests move, or the
server is refused by name at its start.

tests/e2e/test_serve_plugin_kinds.py has adapters, tools, several HTTP processes, /pause and /sleep;
test_serve_kinds.py images and drafts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvmig.models import BUNDLED
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL
from tests.conftest import NEVER_BY_ITSELF, PATIENT
from tests.support.leaks import Footprint, assert_server_is_empty
from tests.support.plugin_server import COMMAND, plugin_environment, plugin_server
from tests.support.streams import run_moved, run_unmoved

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
CALL = {
    "prompt": "Count: 0017 0018", "max_tokens": 300, "seed": 3, "temperature": 0.8, "logprobs": 2,
    "ignore_eos": True,
}  # fmt: skip
BAD_FLAGS = 2


async def test_a_stream_moved_between_ranks_of_two_workers_each_equals_one_that_stayed(
    tmp_path: Path,
) -> None:
    flags = [*SMALL, *PATIENT, NEVER_BY_ITSELF, "--shutdown-timeout=5"]
    flags += ["--data-parallel-size=2", "--tensor-parallel-size=2"]
    with plugin_server(flags, tmp_path) as served:
        unmoved = await run_unmoved(served, PATH, CALL)
        moved, reports = await run_moved(served, PATH, CALL)
        assert_server_is_empty(served)
        footprint = Footprint.of(served)
    footprint.assert_gone(SERVER_PATIENCE_S)  # its workers notice by themselves

    assert [(one["state"], one["exact"]) for one in reports] == [("committed", True)] * 2, reports
    moved.same_as(unmoved)


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
        capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False,
    )  # fmt: skip

    said = [line for line in done.stderr.splitlines() if line.startswith("kvmig: ")]
    assert done.returncode == BAD_FLAGS, done.stderr
    assert len(said) == 1, done.stderr
    assert said[0].startswith(f"kvmig: {why}")
