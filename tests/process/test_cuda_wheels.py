"""The fork server with vLLM's and torch's CUDA wheels, which can be imported without a GPU.

They are in an environment of their own, which the first test makes: several GB, within a minute
where a registry is near.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvmig.process.fork_server import ForkDone, ForkOrder, join, receive_news, send_order
from kvmig_tools.nursery import Nursery
from scripts.setup_env import CUDA_WHEELS, Setup
from tests.support import authorities, cuda_stubs

pytestmark = [pytest.mark.cuda_wheels, pytest.mark.long]

ROOT = Path(__file__).parent.parent.parent
PYTHON = CUDA_WHEELS / "bin" / "python"
FORK_S = 60.0
SETS_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
BARE = {name: value for name, value in os.environ.items() if name not in SETS_THREADS}
MANY = {**BARE, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "4"}
"""What a user may have set, with whom each BLAS starts three threads when it is loaded."""


@pytest.fixture(scope="module")
def wheels() -> Path:
    """The packages of an environment with the CUDA wheels."""
    with pytest.MonkeyPatch.context() as patched:  # as the registry is trusted outside of tests
        if authorities.MACHINES is None:
            patched.delenv(authorities.VARIABLE)
        else:
            patched.setenv(authorities.VARIABLE, authorities.MACHINES)
        Setup(CUDA_WHEELS, "cuda").install_cuda_wheels()
    (packages,) = CUDA_WHEELS.glob("lib/python*/site-packages")
    return packages


def forked(environment: Mapping[str, str]) -> dict[str, Any]:
    """What a fork of a nursery finds in itself that has loaded vLLM's CUDA build."""
    reads, writes = os.pipe()
    with (
        os.fdopen(reads) as said,
        Nursery("vllm", environment, python=str(PYTHON)) as nursery,
        join(nursery.address, {}) as sock,
    ):
        sock.settimeout(FORK_S)
        order = ForkOrder("tests.support.cuda_fork", (), environment)
        send_order(sock, order, (0, writes, 2))
        os.close(writes)
        assert isinstance(receive_news(sock), ForkDone)
        found: dict[str, Any] = json.loads(said.readline())
    return found


@pytest.mark.usefixtures("wheels")
def test_a_process_that_has_loaded_the_cuda_wheels_is_forked() -> None:
    found = forked(MANY)

    assert found["cuda"]
    assert "vllm.v1.engine.core" in found["modules"]
    assert found["threads"] == ["MainThread"]
    assert found["blas"] == "4"  # the user's own


def test_where_there_is_a_gpu_loading_leaves_the_driver_alone(wheels: Path, tmp_path: Path) -> None:
    """vLLM asks NVML which GPU there is, and loads what that one runs; CUDA is for the forks."""
    libraries = [one for one in (wheels / "vllm").rglob("*.so") if one.is_file()]
    device, calls = tmp_path / "nvidiactl", tmp_path / "calls"
    device.touch()
    cuda_stubs.build(tmp_path, [*libraries, *(wheels / "torch" / "lib").glob("*.so")], device)
    environment = {
        **MANY,
        "CUDA_VISIBLE_DEVICES": "0",
        "LD_LIBRARY_PATH": str(tmp_path),
        cuda_stubs.CALLS: str(calls),
    }

    found = forked(environment)

    assert "vllm.v1.worker.gpu_worker" in found["modules"]  # as on a GPU
    assert found["threads"] == ["MainThread"]
    assert not found["initialized"]
    assert not calls.exists()
    assert str(device) not in found["files"]
