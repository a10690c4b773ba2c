"""The engines of one run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmig.core.errors import ConfigError
from kvmig.testing.subject import load_factory
from kvmig.testing.suite import ConformanceSuite


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Iterator[ConformanceSuite]:
    """Two engines for all tests."""
    name = request.config.getoption("--engine", None)
    if not name:
        raise pytest.UsageError("--engine is missing, must be MODULE:FACTORY")
    try:
        factory = load_factory(name)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error
    made = ConformanceSuite(factory)
    yield made
    made.close()
