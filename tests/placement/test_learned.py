"""What drains take, learnt from reports of migrations."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.placement.learned import (
    APART_S,
    LAST,
    LearnedMigration,
    as_many_as,
    drains,
    handshake_s,
    mean,
    request_s,
    requests_s,
    step_s,
)


def moved(began: float, seconds: float, source: str = "i0", **more: str) -> LearnedMigration:
    fields = {"id": "m", "state": "committed", "why": "drain"} | more
    return LearnedMigration(
        source=source, total_ms=seconds * 1e3, ended_at=began + seconds, **fields
    )


def test_requests_that_move_at_once_share_the_time() -> None:
    one_by_one = [moved(at, 2.0) for at in (0.0, 2.0, 4.0, 6.0)]
    at_once = [moved(0.0, 2.0) for _ in range(4)]
    assert request_s(drains(one_by_one), 1) == pytest.approx(2.0)
    assert request_s(drains(at_once), 4) == pytest.approx(0.5)


def test_a_drain_of_one_request_says_how_long_as_many_take_as_move_at_once() -> None:
    assert request_s(drains([moved(0.0, 2.0)]), 4) == pytest.approx(0.5)
    assert as_many_as([1, 0, 3, 9], 4) == 4 + 0 + 4 + 9


def test_each_instance_and_each_time_is_a_drain_of_its_own() -> None:
    reports = [
        moved(0.0, 1.0), moved(1.0, 1.0), moved(2.0 + 2 * APART_S, 1.0), moved(0.5, 3.0, "i1"),
    ]  # fmt: skip
    assert [(one.requests, one.seconds) for one in drains(reports)] == [
        (2, 2.0),
        (1, 3.0),
        (1, 1.0),
    ]


def test_a_move_that_was_given_up_takes_time_and_moves_nobody() -> None:
    reports = [moved(0.0, 1.0, state="aborted"), moved(1.0, 1.0)]
    assert [(one.requests, one.seconds) for one in drains(reports)] == [(1, 2.0)]
    assert drains([moved(0.0, 1.0, state="aborted"), moved(0.0, 1.0, why="balance")]) == []


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 5)), min_size=1, max_size=20),
       st.integers(0, 99))  # fmt: skip
def test_a_request_takes_no_more_than_alone_and_the_breaks_and_order_is_nothing(
    spans: list[tuple[float, float]], seed: int
) -> None:
    reports = [moved(*one) for one in spans]
    found = drains(reports)
    assert sum(one.requests for one in found) == len(spans)
    longest, alone = max(one for _, one in spans), sum(one for _, one in spans)
    total = sum(one.seconds for one in found)
    assert longest - 1e-6 <= total <= alone + APART_S * (len(spans) - len(found)) + 1e-6
    Random(seed).shuffle(reports)
    assert drains(reports) == found


def test_old_drains_are_forgotten() -> None:
    reports = [moved(100.0 * at, 9.0 if at == 0 else 1.0) for at in range(LAST + 1)]
    assert request_s(drains(reports), 1) == pytest.approx(1.0)


def test_a_model_is_judged_by_its_own_drains_then_others_then_steps() -> None:
    one, two = drains([moved(0.0, 1.0)]), drains([moved(0.0, 3.0)])
    assert requests_s({"a": one, "b": [], "c": two}, {}, 1, 9.0) == {"a": 1.0, "b": 2.0, "c": 3.0}
    known = requests_s({"a": [], "b": []}, {"a": 0.1, "b": None}, 4, 9.0)
    assert known == {"a": handshake_s(0.1, 4), "b": 9.0}


def test_steps_are_read_off_the_metrics_of_all_engines() -> None:
    name = "vllm:inter_token_latency_seconds"
    text = "".join(
        f'{name}_{what}{{engine="{at}",model_name="m"}} {value}\n'
        for at, both in enumerate([(1.0, 10.0), (3.0, 30.0)])
        for what, value in zip(("sum", "count"), both, strict=True)
    )
    assert step_s(f'# HELP {name} x\n{name}_bucket{{le="1"}} 7\n{text}') == pytest.approx(0.1)
    assert step_s("") is None


def test_a_mean_is_of_the_last_ones() -> None:
    assert mean([], 1.5) == 1.5
    assert mean([9.0] + [1.0] * LAST, 1.5) == 1.0
