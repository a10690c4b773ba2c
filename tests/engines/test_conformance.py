"""The conformance suite, run as its users run it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import conftest
from kvmig.core.errors import ConfigError
from kvmig.testing import plugin
from kvmig.testing.subject import load_factory
from tests.support.vllm_side import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]


def run_suite(*arguments: str, **env: str) -> tuple[int, str]:
    """Exit code and output of the suite in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q"]
    done = subprocess.run(
        [*command, "--pyargs", "kvmig.testing", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.engine
def test_the_transformers_engine_conforms() -> None:
    code, output = run_suite("--engine", "kvmig.engines.transformers:factory")
    assert code == 0, output


@pytest.mark.long
@pytest.mark.engine
def test_the_vllm_engine_conforms() -> None:
    """Two engines in one process; aborts of this adapter: test_vllm_adapter."""
    chosen = ("-k", "test_moves or test_waiting")
    arguments = ("--engine", "kvmig.engines.vllm:factory", "-W", "ignore", *chosen)
    code, output = run_suite(*arguments, **ENVIRONMENT)
    assert code == 0, output


def test_what_is_installed_brings_the_option_under_the_name_that_a_checkout_has_it() -> None:
    """Under two names pytest would register it twice, and refuse the second option."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {plugin.__name__: plugin.__name__}
    assert conftest.pytest_plugins == [plugin.__name__]


NO_FACTORY = "--engine is 'nothing', must be MODULE:FACTORY"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((), "--engine is missing"), (("--engine", "nothing"), NO_FACTORY)],
)
def test_a_suite_that_has_no_engine_says_so(arguments: tuple[str, ...], sentence: str) -> None:
    code, output = run_suite(*arguments, "-x", "-k", "unknown_requests")
    assert code != 0
    assert sentence in output


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing", NO_FACTORY),
        ("kvmig:nothing", "can't be imported"),
        ("kvmig:__version__", "something that can be called"),
    ],
)
def test_an_engine_that_can_not_be_made_is_named(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_factory(name)
