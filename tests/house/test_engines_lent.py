"""Engines that tests share. None is started."""

from __future__ import annotations

from typing import cast
from unittest import mock

import pytest

from tests.support import vllm_pair
from tests.support.vllm_pair import Engines, Pair
from tests.support.vllm_side import Configuration

PLAIN = Configuration()
OTHER = Configuration(async_scheduling=True)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr(vllm_pair, "Side", lambda wanted: mock.MagicMock())
    monkeypatch.setattr(Pair, "assert_empty", mock.AsyncMock())
    return Engines()


async def test_tests_of_one_configuration_have_the_same_two(engines: Engines) -> None:
    async with engines.lent(PLAIN, PLAIN) as first:
        assert first.a is not first.b
    async with engines.lent(PLAIN, OTHER) as other:
        assert other.a is first.a
        assert other.b is not first.b
    async with engines.lent(PLAIN, PLAIN) as again:
        assert (again.a, again.b) == (first.a, first.b)


async def test_those_that_a_test_does_not_leave_empty_end_and_the_next_has_new_ones(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        stays = AssertionError("a request stays")
        broken.setattr(Pair, "assert_empty", mock.AsyncMock(side_effect=stays))
        with pytest.raises(AssertionError, match="a request stays"):
            async with engines.lent(PLAIN, PLAIN) as spoilt:
                pass
    for side in (spoilt.a, spoilt.b):
        cast("mock.MagicMock", side).close.assert_called_once()
    async with engines.lent(PLAIN, PLAIN) as next_one:
        assert next_one.a is not spoilt.a
