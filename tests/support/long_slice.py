"""`pytest -p tests.support.long_slice --long-slice K --long-check NAME` runs a part of the long
tests."""

from __future__ import annotations

import pytest

from scripts.long_slices import assign_slices, read_seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-slice", type=int, required=True)
    parser.addoption("--long-check", required=True, help="as tests/long_seconds.json has it")


@pytest.hookimpl(trylast=True)  # marks have chosen by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slices = assign_slices(read_seconds())
    check, wanted = config.getoption("--long-check"), config.getoption("--long-slice")
    chosen = [item for item in items if slices.number_of(check, item.nodeid) == wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
