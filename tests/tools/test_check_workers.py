"""The exploration of a model's instances on workers: it finds what is wrong, and nothing where
nothing is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvmig.core.order_fence import OrderFence, OrderToken
from kvmig.fleet.autoscale import InstanceLoad, ScalingOrder, next_order
from kvmig.fleet.leaving_instances import LeavingStep, leaving_step
from kvmig.fleet.workers import Leaving
from kvmig_tools.check import worker_life


@pytest.mark.long  # CI explores all of it by `python -m kvmig_tools.check`
def test_nothing_is_wrong_with_instances_on_workers() -> None:
    found = worker_life.explore()
    assert (found.violation, found.trace) == ("", [])
    assert found.states > 10_000


def hasty(rows: Sequence[InstanceLoad], leaving: Mapping[str, Leaving], *rest: Any) -> LeavingStep:
    """It drains an instance before another one serves."""
    runs = [one.id for one in rows if one.id in leaving and one.state == "serving"]
    return leaving_step(rows, leaving, *rest)._replace(drained=tuple(runs))


def greedy(rows: Sequence[InstanceLoad], leaving: Mapping[str, Leaving], *rest: Any) -> LeavingStep:
    """It takes out what was lost before another one is there."""
    lost = [one.id for one in rows if leaving.get(one.id) == "lost"]
    return leaving_step(rows, leaving, *rest)._replace(removed=tuple(lost))


def stubborn(*_: object) -> LeavingStep:
    """It lets instances stay where they are."""
    return LeavingStep()


@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        (hasty, "an instance is drained before another one serves"),
        (greedy, "the model's last instance ends"),
        (stubborn, "a worker is never emptied, or its instances are never replaced"),
    ],
)
def test_a_wrong_step_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_life, "leaving_step", wrong)
    found = worker_life.explore()
    assert found.violation == violation
    assert found.trace


def test_an_order_that_comes_after_the_next_server_has_looked_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: OrderFence, token: OrderToken) -> str:
        return ""

    monkeypatch.setattr(OrderFence, "refuse", refuse)
    found = worker_life.explore()
    assert found.violation == "an order is carried out that the server takes for lost"


def test_a_model_that_gets_no_other_instance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def adds_none(rows: Sequence[InstanceLoad], wanted: int) -> ScalingOrder | None:
        order = next_order(rows, wanted)
        return None if order is not None and order.more > 0 and not order.failed else order

    monkeypatch.setattr(worker_life, "next_order", adds_none)
    found = worker_life.explore()
    assert found.violation == "a worker is never emptied, or its instances are never replaced"
