"""A child process of the launcher's that doesn't want to end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvmig.cli.children import Child, running
from kvmig.cli.launch import Announcement

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[1]), b'{"endpoint": "here"}\\n')
time.sleep(600)
"""


async def test_a_stop_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = await Child.start("child", running("stubborn", environment), Announcement())
    assert await child.ready(60.0) == "here"
    stopping = asyncio.create_task(child.stop(600.0))
    await asyncio.sleep(0.1)
    stopping.cancel()
    async with asyncio.timeout(60):
        assert await child.ended() == "killed by SIGKILL"
        await asyncio.gather(stopping, return_exceptions=True)
