"""What `import kvmig` brings (how long it takes: `bench.imports`), and what its names are."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvmig
from bench import imports

HEAVY = ("vllm", "ray", "fastapi", "torch", "transformers")


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["__version__", "Migrator", "SyncMigrator", "Llumlet"])
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


def test_an_import_is_timed_in_a_python_of_its_own() -> None:
    assert imports.sample("import kvmig") > 0
