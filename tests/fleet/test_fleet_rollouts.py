"""Roll-outs as the server carries them out: two deployments of a model, and where calls go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.deployments import DeploymentEvent, DeploymentWatcher
from kvmig.fleet.managed_model import CatalogEntry, MissingFiles
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.orders import DeployedProgram, StopDeployment
from kvmig.fleet.placement_controller import PlacementController
from kvmig.fleet.rollout import CallFigures, RolloutPlan, RolloutTerms, begun
from kvmig.fleet.rollout_controller import sources_of
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.proxy.messages import ModelDemand, ModelWanted, ProxyDemand
from tests.support.model_bench import Bench, deployed, served, silence, spec

OLD = spec("path:/old")
NEW = spec("path:/new")


class RolloutBench(Bench):
    """A model of which two deployments may be there."""

    def entry(
        self, new: ModelSpec = NEW, revision: int = 2, plan: RolloutPlan | None = None
    ) -> CatalogEntry:
        stored = None if plan is None else StoredRollout(plan, OLD)
        return CatalogEntry(self.model_id, "a", revision, True, new, stored)

    def roll(self, new: ModelSpec = NEW, **terms: Any) -> RolloutPlan:
        """A new revision is there."""
        plan = begun(RolloutTerms(**terms), 1, 2, self.now)
        self.models.take_catalogue([self.entry(new, plan=plan)])
        self.turn()
        return plan

    def there(self, key: str, instances: int = 1) -> None:
        """That deployment tells that so many instances serve."""
        rows = tuple(served(f"i{one}") for one in range(instances))
        self.watched_of(key).told = DeploymentEvent(0, data=rows)

    def both_there(self) -> None:
        """Both deployments serve, and the step is taken."""
        self.there("a")
        self.there("a@2")
        self.turn(1)
        self.turn()

    def begin(self) -> None:
        """The model serves as it was added."""
        self.models.take_catalogue([self.entry(OLD, 1)])
        self.want("a")
        self.there("a")
        self.turn(1)
        self.say()

    def say(self, version: int | None = None, **running: int) -> None:
        """The only proxy says how many calls each deployment has: `old`, `new`."""
        sockets = {"old": self.old, "new": self.new if "new" in running else ""}
        models = tuple(
            ModelDemand("a", count, 0, 0, count * 0.5, sockets[one])
            for one, count in running.items()
        )
        seen = len(self.told) if version is None else version
        self.models.take_demand("p0", ProxyDemand(seen, 0.5, models))

    @property
    def old(self) -> str:
        """The socket of what was started first."""
        return self.notes[0].socket

    @property
    def new(self) -> str:
        return self.notes[1].socket

    def end(self, number: int, how: str = "exit code 0") -> None:
        """A deployment has ended."""
        self.report_end(self.started[number].deployment, how)
        self.turn()

    def stops(self, number: int) -> bool:
        """Whether the only one that was stopped is this deployment."""
        return self.stopped == [StopDeployment(self.started[number].deployment)]

    def lack_room(self, patch: pytest.MonkeyPatch, free: int) -> None:
        """The host has memory for one deployment, of which so much is free."""
        claim = self.named().claim
        patch.setattr(self.models.memory, "host", lambda: HostCapacity(claim, free))

    @property
    def where(self) -> tuple[str, str, int]:
        """Where new calls go, as told last."""
        route = self.route
        return route.socket, route.next_socket, route.next_percent


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutBench]:
    silence(monkeypatch)
    made = RolloutBench(tmp_path)
    made.begin()
    yield made
    await made.models.close()


def start_rolled(bench: RolloutBench, **terms: Any) -> None:
    """The new one serves."""
    bench.roll(**terms)
    bench.there("a@2")
    bench.turn(1)
    bench.turn()


async def test_another_source_starts_beside_and_the_old_one_serves_on(bench: RolloutBench) -> None:
    bench.roll()
    assert bench.sources == ["/old", "/new"]
    assert bench.where == (bench.old, "", 0)
    assert bench.stopped == []


async def test_new_calls_shift_step_by_step(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=60)
    assert bench.where == (bench.old, bench.new, 10)
    bench.turn(60)
    assert bench.where == (bench.old, bench.new, 50)
    bench.turn(60)
    bench.turn()
    assert bench.where == (bench.new, "", 0)
    assert [one.share for _, one, _ in bench.kept] == [10, 50, 100]


async def test_the_old_one_ends_when_its_streams_have_and_the_new_one_is_the_model(
    bench: RolloutBench,
) -> None:
    bench.say(old=2)
    start_rolled(bench)
    assert bench.where == (bench.new, "", 0)
    bench.say(version=0)
    bench.turn(1)
    assert bench.stopped == [], "a proxy may still send calls there"
    bench.say(old=2, new=1)
    bench.turn(600)
    assert bench.stopped == [], "two streams run"
    bench.say(new=1)
    bench.turn(1)
    assert bench.stops(0)
    bench.end(0)
    bench.turn()
    assert bench.named().socket == bench.new
    assert bench.models.shown("a@2") is None
    assert bench.kept[-1][2], "it is stored that it is done"
    assert bench.where == (bench.new, "", 0)
    assert len(bench.started) == 2


async def test_streams_that_are_left_at_the_deadline_end_with_their_deployment(
    bench: RolloutBench,
) -> None:
    bench.say(old=2)
    start_rolled(bench, deadline_s=100)
    bench.say(old=2)
    bench.turn(98)
    assert bench.stopped == []
    bench.say(old=2)
    bench.turn(3)
    assert bench.stops(0)


async def test_one_that_can_not_start_leaves_all_calls_at_the_old_one(bench: RolloutBench) -> None:
    bench.roll(canary=(10,))
    bench.end(1, "out of memory")
    bench.turn(1)
    bench.say(old=1)
    bench.turn(600)
    plan = bench.models.rollouts.plan("a")
    assert plan is not None
    assert (plan.state, plan.why) == ("stopped", "revision 2 can't start: out of memory")
    assert bench.where == (bench.old, "", 0)
    assert len(bench.started) == 2, "it is not tried again"


async def test_one_that_is_worse_gets_no_more_calls_and_its_streams_end_where_they_are(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,))
    (both,) = bench.models.rollouts.both()
    good, bad = CallFigures(100, 0, 50.0, 100), CallFigures(100, 30, 50.0, 100)
    bench.models.rollouts.judge(both, good, bad)
    bench.say(old=1, new=1)
    bench.turn(1)
    assert bench.where == (bench.old, "", 0)
    bench.say(old=1, new=1)
    bench.turn(600)
    assert bench.stopped == []
    bench.say(old=1)
    bench.turn(1)
    assert bench.stops(1)


async def test_figures_of_an_earlier_step_do_not_count(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=5)
    (both,) = bench.models.rollouts.both()
    bench.turn(5)
    bad = CallFigures(100, 100, 50.0, 100)
    bench.models.rollouts.judge(both, CallFigures(), bad)
    bench.turn(1)
    assert bench.where == (bench.old, bench.new, 50)


async def test_going_back_ends_the_new_one_after_its_streams(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10,))
    bench.say(old=1, new=1)
    bench.models.take_catalogue([bench.entry(OLD, 3)])
    bench.turn(1)
    bench.turn()
    assert bench.where == (bench.old, "", 0)
    bench.say(old=1, new=1)
    bench.turn(60)
    assert bench.stopped == []
    bench.say(old=1)
    bench.turn(1)
    assert bench.stops(1)
    bench.end(1)
    bench.turn()
    assert bench.models.shown("a@2") is None
    assert len(bench.started) == 2


async def test_yet_another_revision_takes_the_place_of_the_one_on_its_way(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,))
    bench.say(old=1, new=1)
    plan = begun(RolloutTerms(), 1, 3, bench.now)
    bench.models.take_catalogue([bench.entry(spec("path:/newer"), 3, plan)])
    bench.turn(1)
    bench.turn()
    assert bench.sources == ["/old", "/new", "/newer"]
    assert bench.where == (bench.old, "", 0)
    bench.say(old=1, new=1)
    bench.turn(1)
    assert bench.stopped == [], "the second one still answers"


async def test_a_change_that_takes_effect_at_once_does_so_on_both(bench: RolloutBench) -> None:
    plan = bench.roll(canary=(10,))
    changed = replace(NEW, priority=7)
    bench.models.take_catalogue([bench.entry(changed, 3, plan)])
    bench.turn(1)
    assert bench.route.priority == 7
    assert len(bench.started) == 2


async def test_an_old_one_that_crashes_comes_back_as_it_was(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10,))
    bench.end(0, "killed")
    bench.models.take_want(ModelWanted("a"))
    bench.turn(1)
    assert bench.sources == ["/old", "/new", "/old"]


async def test_calls_go_back_to_the_old_one_while_the_new_one_does_not_serve(
    bench: RolloutBench,
) -> None:
    bench.say(old=1)
    start_rolled(bench)
    bench.say(old=1)
    assert bench.where == (bench.new, "", 0)
    bench.watched_of("a@2").told = DeploymentEvent(data=(InstanceRow(id="i0", state="starting"),))
    bench.turn(1)
    bench.want("a")
    assert bench.where == (bench.old, "", 0)
    bench.there("a@2")
    bench.turn(1)
    bench.turn()
    assert bench.where == (bench.new, "", 0)
    assert bench.stopped == []


async def test_nothing_that_runs_needs_no_second_deployment(tmp_path: Path) -> None:
    bench = RolloutBench(tmp_path)
    bench.models.take_catalogue([bench.entry(OLD, 1)])
    bench.turn()
    bench.roll()
    assert bench.started == []
    assert bench.kept[-1][2]
    bench.want("a")
    assert bench.sources == ["/new"]
    await bench.models.close()


async def test_without_room_for_both_it_says_so_and_waits_until_the_old_one_is_idle(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.lack_room(monkeypatch, bench.named().claim)
    bench.models.take_catalogue([bench.entry(replace(OLD, instances=InstanceCounts(min=1)), 1)])
    bench.say(old=1)
    bench.roll(replace(NEW, instances=InstanceCounts(min=1)))
    bench.say(old=1)
    bench.turn(60)
    assert len(bench.started) == 1
    assert bench.named("a@2").life.why.startswith("no room")
    bench.say()
    bench.turn(1)
    bench.say()
    bench.turn(1)
    assert bench.stops(0)
    bench.end(0)
    bench.turn()
    assert bench.started[-1].words[0] == "/new"
    assert bench.named().socket == bench.new


async def test_the_old_one_serves_on_while_the_new_ones_files_are_on_their_way(
    bench: RolloutBench,
) -> None:
    bench.missing["hf:org/new"] = MissingFiles("its files are 5 % here", failed=False)
    bench.roll(spec("hf:org/new"), deadline_s=1)
    for _ in range(5):
        bench.say(old=0)
        bench.turn(1)
    assert bench.named("a@2").life.why == "its files are 5 % here"
    assert bench.where == (bench.old, "", 0)
    assert bench.stopped == []


async def test_the_connection_to_the_old_one_is_closed_once_that_has_ended(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    async def close() -> None:
        closed.append("old")

    monkeypatch.setattr(bench.watched, "close", close)
    start_rolled(bench)
    for _ in range(3):
        bench.say(old=0, new=1)
        bench.turn(1)
    bench.end(0)
    bench.turn(1)
    await asyncio.sleep(0)
    assert bench.named().socket == bench.new
    assert closed == ["old"]


async def test_people_are_shown_the_deployment_that_new_calls_go_to(bench: RolloutBench) -> None:
    assert bench.models.fronts() == [bench.named()]
    bench.say(old=1)
    start_rolled(bench)
    assert bench.named().life.state == "emptying"
    (front,) = bench.models.fronts()
    assert (front.key, front.life.state) == ("a@2", "serving")


async def test_streams_gather_on_as_few_old_instances_as_hold_them(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[str] = []

    async def drain(_: DeploymentWatcher, instance: str, deadline_s: float | None = None) -> None:
        drained.append(instance)

    monkeypatch.setattr(DeploymentWatcher, "drain", drain)
    start_rolled(bench)
    for instances in (3, 2, 1):
        bench.say(old=1)
        bench.there("a", instances)
        bench.turn(1)
        ordering = bench.named().ordering
        assert ordering is not None
        await ordering
    assert len(drained) == 2
    assert bench.stopped == []


async def next_server(
    bench: RolloutBench, plan: RolloutPlan | None, *running: DeployedProgram, revision: int = 2
) -> None:
    """Another server takes over what runs, in any order."""
    await bench.models.close()
    after = Bench(bench.folder)
    after.now = bench.now
    bench.told, bench.ordered = after.told, after.ordered
    bench.models = after.models
    entry = bench.entry(NEW if plan is not None or revision == 2 else OLD, revision, plan)
    bench.models.take_catalogue([entry])
    bench.adopt(*running)


@pytest.mark.parametrize("turned", [False, True])
async def test_the_next_server_goes_on_with_the_step_that_was_stored(
    bench: RolloutBench, turned: bool
) -> None:
    start_rolled(bench, canary=(10,))
    running, plan, where = bench.running, bench.kept[-1][1], (bench.old, bench.new, 10)
    await next_server(bench, plan, *(running[::-1] if turned else running))
    bench.turn()
    bench.both_there()
    assert (bench.where, bench.started, bench.stopped) == (where, [], [])


async def test_the_next_server_knows_the_new_one_by_its_start_if_it_is_of_a_later_revision(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,))
    first, second = bench.notes
    plan = bench.kept[-1][1]
    running = deployed("d2", replace(second, revision=3)), deployed("d1", first)
    # A change that took effect at once has come since.
    await next_server(bench, plan, *running, revision=3)
    bench.turn()
    bench.both_there()
    assert bench.where == (first.socket, second.socket, 10)
    assert (bench.started, bench.stopped) == ([], [])


async def test_where_all_has_ended_the_next_server_starts_both_and_keeps_the_share(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,))
    await next_server(bench, bench.kept[-1][1])
    bench.want("a")
    assert bench.sources == ["/old", "/new"]
    bench.both_there()
    assert bench.where == (bench.old, bench.new, 10)


async def test_where_all_has_ended_before_the_new_one_served_the_old_one_starts_first(
    bench: RolloutBench,
) -> None:
    plan = bench.roll()
    await next_server(bench, plan)
    least = InstanceCounts(min=1)
    bench.models.take_catalogue([bench.entry(replace(NEW, instances=least), plan=plan)])
    bench.turn()
    assert bench.sources == ["/old", "/new"]


async def test_an_old_one_that_has_no_room_any_more_leaves_all_calls_to_the_new_one(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_rolled(bench, canary=(10,), hold_s=600)
    bench.end(0)
    assert bench.where != (bench.new, "", 0)
    bench.lack_room(monkeypatch, 0)
    for _ in range(3):
        bench.models.take_want(ModelWanted("a"))
        bench.turn(1)
    assert bench.where == (bench.new, "", 0)
    assert bench.kept[-1][2], "it is done"


async def test_an_old_one_whose_files_are_gone_leaves_all_calls_to_the_new_one(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,), hold_s=600)
    bench.missing["path:/old"] = MissingFiles("its files are not looked up yet", failed=False)
    bench.end(0)
    for _ in range(3):
        bench.models.take_want(ModelWanted("a"))
        bench.turn(1)
    assert bench.where == (bench.new, "", 0)


async def test_an_order_knows_of_a_roll_out_that_is_done_and_holds_its_models(
    bench: RolloutBench,
) -> None:
    start_rolled(bench)
    bench.say(new=1)
    bench.turn(1)
    bench.end(0)
    bench.turn()
    with bench.models.rollouts.order(["a", "b"], RolloutTerms(hold_s=3)) as terms:
        assert terms == RolloutTerms(hold_s=3, over={"m1": 2})
    with bench.models.rollouts.order(["a"], RolloutTerms()):
        bench.roll(spec("path:/newest"))
        assert bench.models.shown("a@3") is None


async def test_both_deployments_are_known_by_the_models_name(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10,))
    assert [one.key for one in bench.models.rollouts.deployments("a")] == ["a", "a@2"]
    assert bench.models.rollouts.deployments("b") == []


async def test_a_model_is_woken_once_the_catalogue_has_it(bench: RolloutBench) -> None:
    bench.models.wake("b")
    entry = CatalogEntry("m2", "b", 1, True, replace(OLD, name="b"))
    bench.models.take_catalogue([bench.entry(OLD, 1), entry])
    bench.turn()
    assert len(bench.started) == 2
    bench.models.wake("c")
    bench.models.take_catalogue([bench.entry(OLD, 1), entry])
    other = CatalogEntry("m3", "c", 1, True, replace(OLD, name="c"))
    bench.models.take_catalogue([bench.entry(OLD, 1), entry, other])
    bench.turn()
    assert len(bench.started) == 2, "it was not there when the next catalogue came"


async def test_no_step_is_taken_while_an_order_is_carried_out(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10,), hold_s=60)
    with bench.models.rollouts.hold("a"):
        bench.turn(60)
        assert bench.where == (bench.old, bench.new, 10)
    bench.turn()
    bench.turn()
    assert bench.where == (bench.new, "", 0)


def test_files_of_what_a_model_rolls_out_from_stay_once_they_are_here() -> None:
    base, newest = spec("hf:org/old"), spec("hf:org/new")
    row = ModelRow(
        model_id="m1",
        name="a",
        revision=2,
        on=True,
        author="x",
        created=0.0,
        changed=0.0,
        spec=newest,
    )
    stored = StoredRollout(begun(RolloutTerms(), 1, 2, 0), base)

    def resolved(one: ModelSpec) -> ModelSpec:
        return replace(one, source="path:/files/1")

    found = sources_of([row], {"m1": stored}, resolved)
    assert found == {"a": "hf:org/new", "a@1": "hf:org/old"}
    assert sources_of([row], {"m1": stored}, lambda one: one) == {"a": "hf:org/new"}


@pytest.mark.parametrize("turned", [False, True])
async def test_the_next_server_ends_one_that_nobody_wants_any_more_after_its_streams(
    bench: RolloutBench, turned: bool
) -> None:
    start_rolled(bench, canary=(10,))
    running, old, new = bench.running, bench.old, bench.new
    await next_server(bench, None, *(running[::-1] if turned else running), revision=3)
    bench.turn()
    assert bench.named("a@2").claimed == bench.named().claimed > 0, "both take memory"
    bench.there("a")
    bench.there("a@2")
    bench.turn(1)
    busy = ModelDemand("a", 1, 0, 0, 0.5, new)
    bench.models.take_demand("p0", ProxyDemand(len(bench.told), 0.5, (busy,)))
    bench.turn(1)
    assert bench.where == (old, "", 0)
    assert bench.stopped == []
    bench.models.take_demand("p0", ProxyDemand(len(bench.told), 0.5))
    bench.turn(1)
    bench.turn(1)
    assert bench.stopped == [StopDeployment(running[1].deployment)]


async def test_one_that_is_done_does_not_begin_again_while_that_is_not_stored(
    bench: RolloutBench,
) -> None:
    plan = bench.roll()
    bench.there("a@2")
    bench.turn(1)
    bench.say()
    bench.turn(1)
    bench.end(0)
    bench.turn()
    assert bench.named().socket == bench.new
    bench.models.take_catalogue([bench.entry(plan=plan)])
    bench.turn()
    assert bench.named().socket == bench.new
    assert len(bench.started) == 2


async def test_a_placement_is_refused_while_a_model_has_two_deployments(
    bench: RolloutBench,
) -> None:
    async def store(_: object) -> None: ...

    start_rolled(bench, canary=(10,))
    placer = PlacementController(bench.models, store)
    model = {"name": "a", "kv_bytes": 1, "held_bytes": 1}
    given = {"units": [{"name": "left", "memory_bytes": 1 << 30, "models": [model]}]}
    with pytest.raises(ConfigError, match="model a rolls out to another deployment"):
        await placer.accept_placement(given, None)


@pytest.fixture
def narrow(bench: RolloutBench, monkeypatch: pytest.MonkeyPatch) -> RolloutBench:
    """There is no room for both, and the old one ends for the new one."""
    bench.lack_room(monkeypatch, bench.named().claim)
    bench.roll()
    for _ in range(3):
        bench.say()
        bench.turn(1)
    assert bench.stops(0)
    return bench


async def test_a_call_that_comes_right_after_an_undo_is_not_forgotten(narrow: RolloutBench) -> None:
    narrow.models.take_catalogue([narrow.entry(OLD, 3)])
    narrow.models.take_want(ModelWanted("a"))
    narrow.end(0)
    narrow.turn()
    assert narrow.sources == ["/old", "/old"]


async def test_a_call_that_waits_while_a_roll_out_is_undone_is_not_forgotten(
    narrow: RolloutBench,
) -> None:
    narrow.models.take_want(ModelWanted("a"))
    narrow.models.take_catalogue([narrow.entry(OLD, 3)])
    narrow.end(0)
    narrow.turn()
    assert narrow.sources == ["/old", "/old"]


async def test_while_a_placement_sets_its_instances_it_waits_and_says_so(
    bench: RolloutBench,
) -> None:
    bench.models.place({"a": []})
    bench.roll()
    bench.turn(60)
    assert len(bench.started) == 1
    assert bench.models.rollouts.blocked == {"a": "a placement sets its instances"}
