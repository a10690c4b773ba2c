"""What is public, and its signatures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import public_api

MODULES = [
    public_api.parsed(entry)[0] for entries in public_api.PAGES.values() for entry in entries
]
HEAVY = ("vllm", "ray", "fastapi", "torch", "transformers")


def test_the_signatures_of_what_is_public_are_those_of_the_sources() -> None:
    changed = public_api.difference()
    assert not changed, (
        f"{changed}\nrun `python -m scripts.public_api`,"
        " and say in changelog.d why what is public changes"
    )


def test_a_changed_signature_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = public_api.signatures().replace("def cancel(", "def stop(")
    monkeypatch.setattr(public_api, "signatures", lambda: text)
    changed = public_api.difference().splitlines()
    assert any(line.startswith("-") and "def cancel(" in line for line in changed)
    assert any(line.startswith("+") and "def stop(" in line for line in changed)
    assert public_api.main(["--check"]) == 1


def test_what_is_public_can_be_imported_without_an_engine_or_a_server() -> None:
    light = [name for name in MODULES if not name.startswith("kvmig.engines.vllm.")]
    code = (
        "import importlib, sys\n"
        f"for name in {light!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
