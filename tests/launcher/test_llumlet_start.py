"""A llumlet that never gets to serve."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvmig.controlplane.llumlet import Llumlet
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import StartupError
from kvmig.engines.base import OnCallDone, OnOutputs
from kvmig.engines.toy.engine import ToyEngine


class DiesWarmingUp(ToyEngine):
    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        super().connect(on_outputs, on_call_done, on_exit)
        asyncio.get_running_loop().call_soon(on_exit, RuntimeError("index out of bounds"))

    async def warm_up(self) -> None:
        await asyncio.sleep(600)


async def test_an_engine_that_fails_while_it_warms_up_ends_the_start() -> None:
    llumlet = Llumlet("i0", "cluster", b"a secret of 16 b", ClusterConfig(), DiesWarmingUp())
    with pytest.raises(StartupError, match="while it warmed up: index out of bounds"):
        await llumlet.start()
    await llumlet.close(1.0)


def test_one_whose_launcher_has_gone_before_it_was_told_what_to_be_ends_in_silence() -> None:
    heard, announced = os.pipe()
    os.close(heard)
    done = subprocess.run(
        [sys.executable, "-m", "kvmig.launcher.llumlet_main", str(announced)],
        input="", pass_fds=(announced,), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    os.close(announced)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
