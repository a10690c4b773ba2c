"""bench.pools: what it calls unused, and what it calls a step's cost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.pools import MIB, MODELS, Queue, caches, times, token_bytes, waste

pytestmark = pytest.mark.engine

PAIR = ("Qwen3-0.6B", "SmolLM2-135M")


def test_of_head_wise_blocks_only_the_last_of_a_request_is_partly_unused(tmp_path: Path) -> None:
    figures = waste(PAIR, tmp_path, 512 * MIB, "head-wise", 60)
    assert figures["unit MiB"] * MIB == 2 * 2 * 2048
    assert 0 < figures["unused of what is leased"] < 0.1
    assert figures["memory that holds tokens"] > 0.8


def test_a_queue_gives_back_all_that_it_took(tmp_path: Path) -> None:
    one, other = caches(PAIR, tmp_path, 512 * MIB, "sectors")
    queue = Queue(one, token_bytes(MODELS[PAIR[0]]), random.Random(0))
    for _ in range(20):
        queue.tick(1000)
    assert 0 < queue.held() <= queue.leased() <= 512 * MIB
    assert queue.short
    while queue.running:
        queue.end(queue.running[-1])
    other.pool.try_to_free_sectors()
    assert one.pool.pool.free_units() == one.pool.num_sectors


def test_a_steps_cost_is_the_median_ratio_within_the_rounds() -> None:
    rows = [
        {"round": number, "model": "m", "place": place, "us": us}
        for number, pair in enumerate([(100, 110), (1000, 1300), (10, 12)])
        for place, us in zip(("own", "sectors"), pair, strict=True)
    ]
    assert times(rows, "m", "sectors") == pytest.approx(1.2)
