"""A front end keeps nothing of calls that are over, whatever they asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.long]
KEPT = 300
"""Blocks of Python's memory that each further round may leave: for 27 calls, whose smallest has a
hundred times as many."""


def test_no_call_leaves_anything_behind_once_its_kind_was_there_before() -> None:
    run = [sys.executable, "-m", "tests.support.kept_measure"]
    done = subprocess.run(
        run, capture_output=True, text=True, timeout=SERVER_PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["grown"] < KEPT * found["rounds"], found
