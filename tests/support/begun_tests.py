"""`pytest -p tests.support.begun_tests --begun-tests FILE` keeps the name of the test that began
last there: a process that a signal ends in its midst leaves nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest


class BegunTests:
    """Writes the file, which isn't kept open: a test that closes one twice would lose it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Called by pytest before a test's setup."""
        self._file.write_text(nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--begun-tests", type=Path, required=True, help="the file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(BegunTests(config.getoption("--begun-tests")), "begun tests")
