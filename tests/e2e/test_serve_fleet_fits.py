"""What an evaluation suggests for a model that does not fit, started as it is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvmig_tools.fleet import FleetUp

pytestmark = [pytest.mark.server, pytest.mark.long]

COUNT = Path(__file__).parents[2] / "kvmig" / "models" / "count"
MEMORY = 3 << 30
"""What the fleet's models may take of the host."""
FLAGS = "--enforce-eager --block-size 32"
SUGGESTED = re.compile(r"it fits with (.+): it then needs (\d+) bytes, and takes requests of \d+ ")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUp]:
    with FleetUp(tmp_path_factory.mktemp("fleet"), f"--memory={MEMORY}") as made:
        yield made


def kvmig(fleet: FleetUp, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kvmig", f"--data={fleet.folder}", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (MEMORY, "the host: needs "),
        # Which 512 tokens would fill, as the block of vLLM's own has no room then.
        (1 << 20, "a KV cache of 1048576 bytes has no room for a request of "),
    ],
    ids=["memory", "cache"],
)
def test_a_model_that_does_not_fit_starts_with_the_flags_that_are_suggested_and_answers(
    fleet: FleetUp, cache: int, why: str
) -> None:
    given = f"{FLAGS} --kv-cache-memory-bytes={cache}"
    said = kvmig(fleet, "model", "evaluate", "x", f"path:{COUNT}", "--flags", given)
    assert why in said
    ((flags, need),) = SUGGESTED.findall(said)
    assert int(need) <= MEMORY

    spoken = kvmig(
        fleet, "run", f"path:{COUNT}", "Count from 41", "--flags", f"{given} {flags}",
        "--max-tokens", "20",
    )  # fmt: skip
    assert "0042 0043" in spoken
    (row,) = fleet.instances("count")
    taken = psutil.Process(row["pid"]).memory_full_info().uss
    assert taken <= int(need)
    kvmig(fleet, "rm", "count")
