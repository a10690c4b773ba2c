"""The parts of `bench.replace` that decide."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from bench.agents import agents_of
from bench.arrivals import Arrival
from bench.replace import (
    AGENT_FAULTS,
    MODELS,
    PLACEMENTS,
    UNITS,
    Client,
    Leg,
    counted,
    placement_text,
    renewed,
    summarise,
    unit_of,
    victim,
)
from kvmig.placement.file import read
from kvmig.placement.moves import PlanRefused, plan


@pytest.mark.parametrize(("here", "there"), [("A", "B"), ("B", "A")])
def test_there_is_a_way_between_its_placements_and_each_wave_moves_one(
    here: str, there: str
) -> None:
    before, after = (read(placement_text(one), one) for one in (here, there))
    now = {slot: lease._replace(used=1) for slot, lease in before.leases().items()}
    waves = plan(after.site(dict.fromkeys(MODELS, 5.0)), now, after.leases())
    assert not isinstance(waves, PlanRefused)
    assert [one.steps[0].kind for one in waves] == ["drain", "start", "drain", "start"]
    assert all(len(PLACEMENTS[here][unit]) == 2 for unit in UNITS)


@pytest.mark.parametrize(("here", "there"), [("A", "B"), ("B", "A")])
def test_with_agents_quotas_change_before_between_and_after_what_moves(
    here: str, there: str
) -> None:
    before, after = (read(placement_text(one, agents=True), one) for one in (here, there))
    now = {slot: lease._replace(used=1) for slot, lease in before.leases().items()}
    waves = plan(after.site(dict.fromkeys(MODELS, 5.0)), now, after.leases())
    assert not isinstance(waves, PlanRefused)
    kinds = [one.steps[0].kind for one in waves]
    assert [one for one in kinds if one != "quota"] == ["drain", "start", "drain", "start"]
    assert (kinds[0], kinds[3], kinds[-1]) == ("quota", "quota", "quota")
    assert {wave for _, wave in AGENT_FAULTS} == set(range(1, len(waves) + 1))


def test_it_counts_on_as_the_model_does() -> None:
    assert bytes(counted(17, 12)).decode() == " 0019 0020 0"
    assert len(counted(17, 1001)) == 1001


def test_waits_are_those_inside_answers_not_between_them() -> None:
    one = Client("a", "m", "u", random.Random(0))
    one.arrivals = [[Arrival(1.0, 0, 1), Arrival(1.1, 1, 1)], [Arrival(5.0, 0, 1)]]
    assert one.waits_ms(0, 9) == pytest.approx([100])
    assert one.longest_ms(0, 9) == pytest.approx(100)


def test_a_summary_counts_gaps_in_steps_and_faults_apart() -> None:
    smooth = Leg("B", "", 0, 10.0, 12.0, 4, "", True, True, [(10, 15, 20), (10, 12, 35)])
    hurt = Leg("A", "source", 1, 10.0, 50.0, 4, "a in left", False, True, [(10, 15, 900)])
    client = Client("a", "m", "u", random.Random(0), answers=3, wrong=["one"])
    found = summarise([smooth, hurt], [client])
    assert found["longest_gap_steps_median"] == pytest.approx(2.75)
    assert found["longest_gap_steps_worst"] == pytest.approx(3.5)
    assert found["undisturbed_steps_worst"] == pytest.approx(1.5)
    assert (found["wrong_or_lost"], found["not_reached"], found["answers"]) == (1, 1, 3)
    assert found["took_over_planned_worst"] == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("fault", "steps", "hit"),
    [
        ("source", "b drains from left (0.1 GiB to right)", ("b", "left")),
        ("destination", "b drains from left (0.1 GiB to right)", ("b", "right")),
        ("start", "c starts in left (0.6 GiB of weights)", ("c", None)),
        ("source", "c starts in left (0.6 GiB of weights)", ("c", "right")),
        ("destination", "c starts in left (0.6 GiB of weights)", ("a", "left")),
    ],
)
def test_a_fault_meets_one_that_the_wave_is_about(
    fault: str, steps: str, hit: tuple[str, str | None]
) -> None:
    places = {"a": {"left"}, "b": {"left", "right"}, "c": {"right"}}
    assert victim(fault, steps, places) == hit


@pytest.mark.parametrize(
    ("steps", "unit"),
    [
        ("b has 0.02 GiB for KV in right; c has 0.02 GiB for KV in left", "right"),
        ("b drains from left (0.1 GiB to right)", "left"),
        ("c starts in left (0.6 GiB of weights)", "left"),
        ("requests of a leave right (0.1 GiB to left)", "right"),
    ],
)
def test_the_agent_that_is_killed_is_that_of_the_unit_whose_turn_it_is(
    steps: str, unit: str
) -> None:
    assert unit_of(steps) == unit


async def test_an_agent_that_was_killed_comes_back_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.agents.AWAY_S", 0.0)
    started: list[Path] = []
    closed: list[Path] = []

    class Agent:
        def __init__(self, path: Path, arena: int) -> None:
            assert arena == 4096
            self.path = path
            started.append(path)

        def close(self) -> None:
            closed.append(self.path)

    monkeypatch.setattr("bench.agents.Agent", Agent)
    left, right = tmp_path / "left", tmp_path / "right"
    with agents_of(tmp_path, ("left", "right"), 4096) as agents:
        assert agents.flags == [f"--unit=left: {left}", f"--unit=right: {right}", f"--unit={left}"]
        await agents.kill("right")
        assert (started, closed) == ([left, right, right], [right])
        assert await agents.leased("right") == 0, "nobody listens there"
    assert closed == [right, left, right]


async def test_a_fault_waits_until_every_client_has_another_answer() -> None:
    clients = [Client("a", "m", "u", random.Random(number), answers=3) for number in range(2)]
    waiting = asyncio.create_task(renewed(clients))
    await asyncio.sleep(0)
    clients[0].answers += 1
    await asyncio.sleep(0.25)
    assert not waiting.done()
    clients[1].answers += 1
    await asyncio.wait_for(waiting, 5)
