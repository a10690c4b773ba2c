"""What `import kvmig` brings, and what its names are."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvmig

HEAVY = ("vllm", "ray", "fastapi", "torch", "transformers")


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


def test_importing_kvmig_takes_less_than_three_tenths_of_a_second_of_cpu() -> None:
    code = (
        "import time; began = time.process_time(); import kvmig; print(time.process_time() - began)"
    )
    assert float(_run(code)) < 0.3


@pytest.mark.parametrize("name", ["Migrator", "SyncMigrator"])
def test_embedding_brings_no_engine_and_no_server(name: str) -> None:
    code = (
        f"import sys, kvmig; kvmig.{name};"
        f" print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert _run(code) == "[]"


def test_all_names_can_be_had_and_others_are_refused() -> None:
    assert all(getattr(kvmig, name) for name in kvmig.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Emigrator'"):
        getattr(kvmig, "Emigrator")  # noqa: B009
