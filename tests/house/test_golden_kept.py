"""What kvmig shows to its users and writes for other programs is what tests/golden has."""

from __future__ import annotations

import subprocess
import sys

from scripts.golden import KEPT, kept_in
from scripts.golden_outputs import OUTPUTS, ROOT, SLOW

ELSEWHERE = {"signatures", "wire"}
"""Compared with docs/signatures.txt and tests/corpus by tests of their own."""


def test_what_is_shown_is_what_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "scripts.golden", "compare", "--quick"],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


def test_each_quick_output_is_kept() -> None:
    assert set(kept_in(KEPT)) >= OUTPUTS.keys() - {*SLOW} - ELSEWHERE
