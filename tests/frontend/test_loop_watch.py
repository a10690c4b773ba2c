"""A front end whose event loop stood still says for how long, and whose calls were in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import pytest
from prometheus_client import CollectorRegistry

from kvmig.asgi.body_budget import BodyBudget
from kvmig.frontend.loop_watch import LoopWatch


async def test_a_loop_that_stands_still_is_counted_with_those_whose_bodies_were_in(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, budget = CollectorRegistry(), BodyBudget(100)
    watch = asyncio.create_task(LoopWatch(registry, budget.take_seen).run())
    await asyncio.sleep(0.1)
    share = budget.enter("anna")
    share.count_bytes(1)
    share.give_back()  # within the same turn of the loop
    with caplog.at_level(logging.WARNING):
        time.sleep(0.4)  # noqa: ASYNC251 - stands still
        await asyncio.sleep(0.1)
    watch.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watch
    assert (registry.get_sample_value("kvmig_http_loop_stall_seconds_count") or 0) >= 1
    assert (registry.get_sample_value("kvmig_http_loop_stall_seconds_sum") or 0) > 0.2
    assert any("stood still" in one.message and "anna" in one.message for one in caplog.records)


def test_a_loop_that_is_a_little_late_is_not_counted() -> None:
    registry = CollectorRegistry()
    LoopWatch(registry, set).record_lateness(0.05)
    assert registry.get_sample_value("kvmig_http_loop_stall_seconds_count") == 0
