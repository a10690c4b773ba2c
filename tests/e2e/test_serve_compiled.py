"""Real vLLM engines that compile their model: once, however many start, and however often."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served

pytestmark = [pytest.mark.server, pytest.mark.long]

FLAGS = [*(one for one in SMALL if one != "--enforce-eager"), "--shutdown-timeout=2"]


def compiled(served: Served, number: int) -> dict[str, str]:
    """Where each instance's compiled code came from, once so many serve."""
    deadline = time.monotonic() + SERVER_PATIENCE_S
    while True:
        rows = [one for one in served.get("instances") if one["state"] == "serving"]
        if len(rows) == number:
            return {one["id"]: one["times"]["compiled"] for one in rows}
        assert time.monotonic() < deadline, served.output()
        time.sleep(0.2)


def test_of_instances_that_start_at_once_one_compiles_and_every_later_one_finds_it(
    tmp_path: Path,
) -> None:
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    log = tmp_path / "log"
    with Served([*FLAGS, "--instances=2"], environment=environment, log=log) as served:
        assert sorted(compiled(served, 2).values()) == ["found", "made"]
        url = f"{served.url}/kvmig/v1/instances"
        httpx.post(url, json={"count": 1}, timeout=SERVER_PATIENCE_S).raise_for_status()
        assert compiled(served, 3)["i2"] == "found"
    again = {**environment, "OMP_NUM_THREADS": "1"}
    with Served([*FLAGS, "--instances=1"], environment=again, log=log) as served:
        assert compiled(served, 1) == {"i0": "found"}, served.output()
        assert "its start took" in served.output()
        assert "compiled before" in served.output()
