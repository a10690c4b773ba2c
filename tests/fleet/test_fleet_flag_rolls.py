"""Other flags for a model's instances, as the server carries that out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import StartupError
from kvmig.fleet.autoscale import ScalingDecision
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher, OrderUnanswered
from kvmig.fleet.flag_rolls import RolledStart, RollStep
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, begun, paused, resumed
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from tests.support.model_bench import Bench, deployed, silence, spec

COUNTS = InstanceCounts(max=4)
OLD = spec(flags=("--max-num-seqs=4",), instances=COUNTS)
NEW = spec(flags=("--max-num-seqs=8",), instances=COUNTS)
FLAGS = "--max-num-seqs=8"


class RollBench(Bench):
    """A deployment whose instances start again at once, or not at all."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.rows: list[InstanceRow] = []
        self.asked: list[tuple[str, str, float | None]] = []
        self.bad = ""
        """Flags with which none starts."""

    def has(self, *flags: str) -> None:
        """Instances with these flags serve."""
        self.rows = [
            InstanceRow(id=f"i{at}", state="serving", blocks_total=1000, flags=one)
            for at, one in enumerate(flags)
        ]
        self.named().scaling = ScalingDecision(len(flags), changed_at=self.now)
        self.show()

    def show(self) -> None:
        self.watched.told = DeploymentEvent(0, data=tuple(self.rows))

    async def add(self, start: RolledStart) -> set[str]:
        flags = start.flags
        self.asked.append(("", flags, None))
        state = "failed" if self.bad and flags == self.bad else "serving"
        name = f"i{len(self.rows)}"
        detail = "no room" if state == "failed" else ""
        one = InstanceRow(id=name, state=state, detail=detail, blocks_total=1000, flags=flags)
        self.rows.append(one)
        return {name}

    async def restart(self, step: RollStep) -> None:
        instance, flags = step.instance, step.start.flags
        self.asked.append((instance, flags, step.deadline_s))
        self.rows = [
            msgspec.structs.replace(one, flags=flags)
            if one.id == instance and (flags != self.bad or not self.bad)
            else one
            for one in self.rows
        ]

    def change(self, wanted: ModelSpec, plan: RolloutPlan | None = None, revision: int = 2) -> None:
        stored = None if plan is None else StoredRollout(plan, OLD)
        entry = CatalogEntry(self.model_id, "a", revision, True, wanted, stored)
        self.models.take_catalogue([entry])

    async def rounds(self, count: int = 6) -> None:
        for _ in range(count):
            self.show()
            self.demand()
            self.turn(1)
            if (ordering := self.named().ordering) is not None:
                await ordering

    @property
    def flags(self) -> list[str]:
        return [one.flags for one in self.rows]


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RollBench]:
    made = RollBench(tmp_path)

    async def add(_: DeploymentWatcher, count: int, start: RolledStart) -> set[str]:
        return await made.add(start)

    async def restart(_: DeploymentWatcher, step: RollStep) -> None:
        await made.restart(step)

    async def drain(_: DeploymentWatcher, instance: str, deadline_s: float | None = None) -> None:
        made.rows = [one for one in made.rows if one.id != instance]

    silence(monkeypatch)
    monkeypatch.setattr(DeploymentWatcher, "add", add)
    monkeypatch.setattr(DeploymentWatcher, "restart", restart)
    monkeypatch.setattr(DeploymentWatcher, "drain", drain)
    monkeypatch.setattr("kvmig.fleet.instance_orders.PAUSE_S", 0.0)
    made.change(OLD, revision=1)
    made.want("a")
    made.has("")
    made.turn(1)
    yield made
    await made.models.close()


def roll(bench: RollBench, **terms: float) -> RolloutPlan:
    plan = begun(RolloutTerms(**terms), 1, 2, bench.now)  # type: ignore[arg-type]
    bench.change(NEW, plan)
    return plan


async def test_instances_start_again_one_after_the_other_in_the_same_deployment(
    bench: RollBench,
) -> None:
    bench.has("", "")
    roll(bench, deadline_s=30)
    await bench.rounds()
    assert bench.asked[:2] == [("i0", FLAGS, 30), ("i1", FLAGS, 30)]
    assert set(bench.flags) == {FLAGS}
    assert len(bench.started) == 1
    assert bench.kept[-1][2], "it is stored that it is done"
    assert bench.models.rollouts.plan("a") is None


async def test_an_only_instance_hands_its_streams_to_one_more_that_goes_again_later(
    bench: RollBench,
) -> None:
    roll(bench)
    await bench.rounds()
    assert bench.asked == [("", FLAGS, None), ("i0", FLAGS, None)]
    bench.turn(60)
    await bench.rounds(60)
    assert bench.flags == [FLAGS]


async def test_without_room_for_one_more_it_waits(
    bench: RollBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = HostCapacity(bench.named().claim, 0)
    monkeypatch.setattr(bench.models.memory, "host", lambda: full)
    roll(bench)
    await bench.rounds()
    assert bench.asked == []
    assert bench.models.rollouts.plan("a") is not None


@pytest.mark.parametrize("instances", [1, 2])
async def test_flags_with_which_none_starts_stop_it_and_all_are_as_before(
    bench: RollBench, instances: int
) -> None:
    bench.bad = FLAGS
    bench.has(*[""] * instances)
    plan = roll(bench)
    await bench.rounds()
    stopped = bench.models.rollouts.plan("a")
    assert stopped is not None
    assert stopped.state == "stopped"
    assert stopped.why in ("instance i1: no room", f"instance i0 did not start with {FLAGS}")
    assert [one.flags for one in bench.rows if one.state == "serving"] == [""] * instances
    asked = len(bench.asked)

    bench.bad = ""
    bench.change(NEW, resumed(stopped, bench.now))
    await bench.rounds(10)
    assert len(bench.asked) > asked
    assert set(bench.flags) == {FLAGS}
    assert plan.target == 2


async def test_an_order_that_is_refused_stops_it_with_the_deployments_sentence(
    bench: RollBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise StartupError("--max-num-seqs is too small")

    monkeypatch.setattr(DeploymentWatcher, "restart", refuse)
    bench.has("", "")
    roll(bench)
    await bench.rounds()
    stopped = bench.models.rollouts.plan("a")
    assert stopped is not None
    assert (stopped.state, stopped.why) == ("stopped", "--max-num-seqs is too small")


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_an_order_without_an_answer_is_given_again_before_it_stops(
    bench: RollBench, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    restart, left = DeploymentWatcher.restart, [lost]

    async def answer_late(watched: DeploymentWatcher, step: RollStep) -> None:
        if left[0]:
            left[0] -= 1
            raise OrderUnanswered("it doesn't answer")
        await restart(watched, step)

    monkeypatch.setattr(DeploymentWatcher, "restart", answer_late)
    bench.has("", "")
    roll(bench)
    await bench.rounds()
    plan = bench.models.rollouts.plan("a")
    if lost < 3:
        assert plan is None, "it is done"
        assert set(bench.flags) == {FLAGS}
    else:
        assert plan is not None
        assert (plan.state, plan.why) == ("stopped", "it doesn't answer")


async def test_where_they_can_not_become_what_they_were_their_number_is_decided_as_ever(
    bench: RollBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.has("", FLAGS)
    bench.change(OLD, revision=3)

    async def refuse(*_: object) -> None:
        raise StartupError("no device is left")

    monkeypatch.setattr(DeploymentWatcher, "restart", refuse)
    await bench.rounds(60)
    assert len(bench.flags) == 1


async def test_a_paused_one_goes_on_when_it_is_resumed(bench: RollBench) -> None:
    bench.has("", "", "")
    plan = roll(bench)
    await bench.rounds(1)
    bench.change(NEW, paused(plan, bench.now + 1))
    await bench.rounds()
    assert sorted(bench.flags) == ["", "", FLAGS]
    bench.change(NEW, resumed(paused(plan, bench.now), bench.now + 1))
    await bench.rounds()
    assert set(bench.flags) == {FLAGS}


async def test_going_back_gives_them_their_first_flags(bench: RollBench) -> None:
    bench.has("", "")
    roll(bench)
    await bench.rounds()
    bench.change(OLD, revision=3)
    await bench.rounds()
    assert bench.flags == ["", ""]


async def test_what_one_deployment_was_asked_last_says_nothing_of_the_next_one(
    bench: RollBench,
) -> None:
    bench.has("", "")
    roll(bench)
    await bench.rounds()
    bench.report_end(bench.started[0].deployment)
    bench.change(OLD, revision=3)
    bench.turn()
    bench.want("a")
    bench.has("", "")
    plan = begun(RolloutTerms(), 3, 4, bench.now)
    bench.change(NEW, plan, revision=4)
    await bench.rounds()
    assert bench.flags == [FLAGS, FLAGS]


@pytest.mark.parametrize("flags", [["", FLAGS], [FLAGS, FLAGS]])
async def test_the_next_server_sees_how_far_it_is(bench: RollBench, flags: Sequence[str]) -> None:
    plan = roll(bench)
    (note,) = bench.notes
    await bench.models.close()
    after = RollBench(bench.folder)
    after.now = bench.now
    bench.models, bench.kept, bench.told = after.models, after.kept, after.told
    bench.change(NEW, plan)
    bench.adopt(deployed("d1", note))
    bench.turn()
    bench.has(*flags)
    await bench.rounds()
    assert bench.flags == [FLAGS, FLAGS]
    assert bench.asked == ([("i0", FLAGS, None)] if "" in flags else [])
    assert bench.models.rollouts.plan("a") is None
