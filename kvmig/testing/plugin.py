"""The suite's option; pytest finds it by the entry point, or by `-p kvmig.testing.plugin`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The engine under test."""
    parser.addoption(
        "--engine",
        metavar="MODULE:FACTORY",
        help="kvmig.testing: what makes an engine to test (see docs/own-engine.md)",
    )
