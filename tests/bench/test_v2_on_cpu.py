"""Model runner V2's kernels of a decode step in torch, beside Triton's interpreted ones."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.engine
@pytest.mark.long
def test_they_write_what_tritons_write() -> None:
    command = [sys.executable, "-m", "tests.support.v2_kernels"]  # Triton reads its mode once
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    called = [line.split()[0] for line in done.stdout.splitlines()]
    assert list(dict.fromkeys(called)) == ["prefill", "combined", "updated", "sampled", "placed"]
