"""`python -m kvmig.placement.executor`: what it sees, what it orders, and what it does after
failures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow, RequestRow, UnitMemory
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError, StartupError
from kvmig.core.order_fence import TOKEN_HEADER, OrderToken
from kvmig.engines.toy.script import ToyScript
from kvmig.placement.executor import (
    DeploymentClient,
    ExecutorSettings,
    PlacementExecutor,
    ReplaceFailed,
    main,
)
from kvmig.placement.file import UnitPlacement, read, to_toml
from kvmig.placement.learned import handshake_s
from kvmig.placement.moves import PlacedLease, PlanStep
from kvmig.placement.observed import adopted, check, leaving, observed, unfinished
from kvmig.placement.starts import tenths
from tests.support.toys import Toys
from tests.support.waiting import until

HELD, KV = 600, 200


def placement_text(arena: int = 0, **units: str) -> str:
    """Of models by unit, such as left="a b:150": what each has of KV cache, if not the usual; two
    of them fit into one. No two units are alike."""
    text = ""
    for at, (unit, models) in enumerate(units.items()):
        text += f"[[units]]\nname = '{unit}'\narena_bytes = {arena}\nmemory_bytes = {2000 + at}\n"
        for words in models.split():
            name, _, quota = words.partition(":")
            text += f"[[units.models]]\nname = '{name}'\nheld_bytes = {HELD}\nfloor_bytes = 10\n"
            text += f"kv_bytes = {quota or KV}\n"
    return text


def placement(arena: int = 0, **units: str) -> UnitPlacement:
    return read(placement_text(arena, **units), "p.toml")


def on_gpus(*units: str, arena: int = 0) -> UnitPlacement:
    """Of units such as "a:150 b@0,1": models with KV cache, and the unit's GPUs."""
    text = ""
    for at, words in enumerate(units):
        models, _, gpus = words.partition("@")
        text += placement_text(arena, **{f"u{at}": models}).replace(
            "memory_bytes = 2000", f"memory_bytes = {2000 + at}\ngpus = [{gpus}]"
        )
    return read(text, "p.toml")


def row(
    name: str,
    unit: str,
    state: str = "serving",
    used: int = 0,
    running: int = 0,
    shared: UnitMemory | None = None,
) -> InstanceRow:
    return InstanceRow(
        id=name, state=state, unit=unit, blocks_total=100, blocks_used=used, running=running,
        shared=shared,
    )  # fmt: skip


def live(name: str, instance: str, state: str, blocks: int, unmovable: str = "") -> RequestRow:
    return RequestRow(id=name, instance=instance, state=state, blocks=blocks, unmovable=unmovable)


def memory(used: int, guarantee: int) -> UnitMemory:
    return UnitMemory(used_bytes=used, guarantee_bytes=guarantee)


# -- what is seen


def test_used_bytes_are_the_used_part_of_the_quota() -> None:
    rows = {"a": [row("i0", "left", used=25), row("i1", "right", "failed")]}
    seen = observed(placement(left="a", right="a"), rows)
    assert seen.leases == {("a", "left"): PlacedLease(KV, 50)}
    assert (seen.instances, seen.failed) == ({("a", "left"): "i0"}, [("a", "i1")])
    assert seen.unsettled == ""


def test_in_a_unit_with_an_agent_an_instance_has_its_guarantee_and_what_it_was_lent() -> None:
    rows = {"a": [row("i0", "left", used=25, running=2, shared=memory(300, 150))]}
    seen = observed(placement(400, left="a", right="a"), rows)
    assert seen.leases == {("a", "left"): PlacedLease(150, 300)}
    idle = {"a": [row("i0", "left", shared=memory(64, 150))]}
    null_block = observed(placement(400, left="a", right="a"), idle).leases
    assert null_block == {("a", "left"): PlacedLease(150, 0)}


def test_an_instance_that_has_not_told_of_its_unit_is_waited_for() -> None:
    rows = {"a": [InstanceRow(id="i0", state="serving", unit="left")]}
    seen = observed(placement(400, left="a", right="a"), rows)
    assert seen.unsettled == "instance i0 of a has not reported its unit"
    with pytest.raises(
        ConfigError, match=r"instance i0 shares no KV cache .* left has arena_bytes"
    ):
        observed(placement(400, left="a", right="a"), {"a": [row("i0", "left")]})


def test_the_largest_requests_that_can_leave_are_those_that_do() -> None:
    held = [
        live("small", "i0", "running", 10), live("large", "i0", "running", 50),
        live("stays", "i0", "running", 30, "it does"), live("waits", "i0", "waiting", 0),
        live("elsewhere", "i1", "running", 90), live("middle", "i0", "running", 10),
    ]  # fmt: skip
    assert leaving(held, "i0", used=1000, size=400) == ["large"]
    assert leaving(held, "i0", used=1000, size=501) == ["large", "middle"]
    assert leaving(held, "i0", used=1000, size=5000) == ["large", "middle", "small"]
    assert leaving(held, "i0", used=1000, size=0) == []


def test_an_instance_with_a_request_is_never_taken_for_idle() -> None:
    tiny = replace(row("i0", "left", used=1), blocks_total=10**6, running=1)
    waiting = replace(row("i1", "right", used=0), blocks_total=10**6, waiting=1)
    seen = observed(placement(left="a", right="a"), {"a": [tiny, waiting]})
    assert [one.used for one in seen.leases.values()] == [1, 1]


def test_instances_of_which_nobody_said_where_they_are_are_where_they_shall_be() -> None:
    rows = {"a": [row("i0", ""), row("i1", "right")], "b": [row("i0", ""), row("i1", "")]}
    found = adopted(placement(left="b", right="a b"), rows)
    assert found == {"a": {"i0": "left"}, "b": {"i0": "left", "i1": "right"}}  # a: the only room


def test_they_are_elsewhere_if_else_not_all_had_room() -> None:
    rows = {"a": [row("i0", "")], "b": [row("i0", ""), row("i1", "")], "c": [row("i0", "")]}
    found = adopted(placement(left="a c", right="a b"), rows)
    assert found == {"a": {"i0": "left"}, "b": {"i0": "right", "i1": "left"}, "c": {"i0": "right"}}


def test_an_instance_on_gpus_is_in_the_unit_that_has_them() -> None:
    text = placement_text(left="a b", right="a b")
    for at in (0, 1):
        text = text.replace(f"memory_bytes = {2000 + at}", f"memory_bytes = 2000\ngpus = [{at}]")
    text = text.replace("held_bytes", "decode_share = 0.5\nheld_bytes")
    rows = {
        name: [replace(row(f"i{at}", ""), gpus=(gpu,)) for at, gpu in enumerate(gpus)]
        for name, gpus in (("a", "10"), ("b", "1"))
    }
    wanted = read(text, "p.toml")
    assert adopted(wanted, rows) == {"a": {"i0": "right", "i1": "left"}, "b": {"i0": "right"}}
    rows["b"] = [replace(row("i0", ""), gpus=("2",))]
    with pytest.raises(ConfigError, match=r"the units of .*b i0 \(GPU 2\) are not known"):
        adopted(wanted, rows)


def test_an_instance_on_a_worker_is_in_a_unit_of_its_worker() -> None:
    text = placement_text(left="a b", right="a b")
    for at, name in enumerate(("west", "east")):
        size = f"memory_bytes = {2000 + at}"
        text = text.replace(size, f'worker = "{name}"\n{size}')
    wanted, nodes = read(text, "p.toml"), {"west": "n0", "east": "n1"}
    assert read(to_toml(wanted), "p.toml") == wanted
    rows = {"a": [replace(row("i0", ""), node="n1")], "b": [replace(row("i0", ""), node="n0")]}
    assert adopted(wanted, rows, nodes) == {"a": {"i0": "right"}, "b": {"i0": "left"}}
    rows["a"] = [replace(row("i0", ""), node="n1"), replace(row("i1", ""), node="n1")]
    with pytest.raises(ConfigError, match=r"the units of .*a i1 \(worker east\)"):
        adopted(wanted, rows, nodes)


def test_an_instance_without_a_unit_needs_room_in_one() -> None:
    rows = {"a": [row(f"i{at}", "") for at in range(3)]}
    with pytest.raises(ConfigError, match="the units of a i0, a i1, a i2 are not known"):
        adopted(placement(left="a", right=""), rows)


def test_nothing_is_planned_while_an_instance_starts() -> None:
    rows = {"a": [row("i0", "left"), row("i1", "right", "starting")]}
    assert observed(placement(left="a", right=""), rows).unsettled == "instance i1 of a is starting"


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([row("i0", "")], "unit of instance i0 is '', must be of left, right"),
        ([row("i0", "left"), row("i1", "left")], "instances i0 and i1 are both in unit left"),
    ],
)
def test_instances_without_a_place_of_their_own_are_refused(
    rows: list[InstanceRow], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        observed(placement(left="a", right=""), {"a": rows})


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a"], "model is 'b', must be of a"),
        (["a", "b", "c"], "deployment c has no place"),
    ],
)
def test_placements_of_other_models_are_refused(names: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(placement(left="a b"), names, "p.toml")


def test_quotas_that_would_have_to_change_are_refused() -> None:
    text = "[[units]]\nname = '{}'\nmemory_bytes = 9\n[[units.models]]\nname = 'a'\nkv_bytes = {}\n"
    odd = read(text.format("left", 5) + text.format("right", 6), "p.toml")
    with pytest.raises(ConfigError, match="kv_bytes is 6 in unit right, must be 5, as before"):
        check(odd, ["a"], "p.toml")
    check(placement(400, left="a:150", right="a:200"), ["a"], "p.toml")
    check(on_gpus("a:150@0", "a:200@1"), ["a"], "p.toml")


def test_gpus_of_another_node_are_refused() -> None:
    away = replace(on_gpus("a@0").units[0], node=1)
    with pytest.raises(ConfigError, match="node is 1, must be 0: instances get GPUs of one host"):
        check(UnitPlacement([away]), ["a"], "p.toml")
    check(UnitPlacement([away]), ["a"], "p.toml", [1])
    with pytest.raises(ConfigError, match=r"node is 1, must be 0, 2 \(--node\)"):
        check(UnitPlacement([away]), ["a"], "p.toml", [2, 0])


def test_a_wave_is_over_when_who_comes_serves_and_who_leaves_is_gone() -> None:
    steps = [PlanStep("start", "a", "right", 1.0), PlanStep("drain", "a", "left", 1.0)]
    gone = {("a", "left"): "i0"}

    def left(*rows: InstanceRow) -> list[str]:
        return list(unfinished(steps, gone, {"a": rows}))

    assert left(row("i0", "left"), row("i1", "right", "starting")) == [
        "a starts in right", "a leaves left",
    ]  # fmt: skip
    assert left(row("i0", "left", "draining"), row("i1", "right")) == ["a leaves left"]
    assert left(row("i1", "right")) == []
    orders = [PlanStep("quota", "a", "right", 0.0, quota=7), PlanStep("move", "a", "right", 1.0, 5)]
    assert list(unfinished(orders, {}, {"a": [row("i1", "right")]})) == []


# -- what is ordered


class Site:
    """Deployments that carry out orders at once, or don't."""

    def __init__(self, **units: str) -> None:
        self.rows: dict[str, list[InstanceRow]] = {}
        self.orders: list[str] = []
        self.fail_starts = 0
        """So many more can't start."""
        self.refuse = 0
        """So many more orders are refused."""
        self.moved: dict[str, list[dict[str, object]]] = {}
        """Reports of migrations, by deployment."""
        self.metrics = ""
        self.drain_s = 0.0
        """What a drain reports for its only request."""
        self.arena = 0
        """Of each unit's agent; 0: there is none."""
        self.requests: dict[str, list[RequestRow]] = {}
        """By deployment."""
        self.stay = False
        """Whether requests can't be moved."""
        self.starts: list[dict[str, object]] = []
        """What was ordered to start."""
        self.decode_share = 0
        """Of each instance's steps; 0: they don't ask."""
        self._ids = itertools.count()
        for unit, models in units.items():
            for name in models.split():
                self.add(name, unit)

    def add(self, name: str, unit: str, state: str = "serving") -> None:
        there = [one for rows in self.rows.values() for one in rows if one.unit == unit]
        promised = sum(one.shared.guarantee_bytes for one in there if one.shared)
        shared = memory(0, self.arena - promised) if self.arena else None
        one = row(f"i{next(self._ids)}", unit, state, used=10, shared=shared)
        self.rows.setdefault(name, []).append(one)

    def places(self) -> dict[str, str]:
        return {
            name: " ".join(sorted(one.unit for one in rows)) for name, rows in self.rows.items()
        }

    def token(self) -> dict[str, str]:
        """The headers of orders to each deployment."""
        return {}

    def note_unanswered(self) -> None:
        """An order has no answer."""

    async def settle(self) -> None:
        """No earlier order is carried out any more."""

    async def carry_out(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if request.url.path.endswith("/migrations"):
            if request.method == "POST":
                return self.move(name, msgspec.json.decode(request.content))
            return httpx.Response(200, json={"data": self.moved.get(name, [])})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics)
        if request.url.path.endswith("/requests"):
            return self.listing(self.requests.get(name, []))
        if request.method == "GET":
            return self.listing(self.rows[name])
        self.orders.append(f"{request.method} {name}")
        if self.refuse:
            self.refuse -= 1
            return httpx.Response(409, json={"error": {"message": "no free name"}})
        if request.method == "PATCH":
            return self.guarantee(name, request)
        if request.method == "POST":
            self.starts.append(msgspec.json.decode(request.content))
            failed, self.fail_starts = self.fail_starts > 0, max(0, self.fail_starts - 1)
            unit = request.content.decode().partition('"unit":"')[2].partition('"')[0]
            self.add(name, unit, "failed" if failed else "serving")
        else:
            gone = request.url.path.rpartition("/")[2]
            report = {"id": gone, "source": gone, "state": "committed", "why": "drain",
                      "total_ms": self.drain_s * 1e3, "ended_at": 1e9}  # fmt: skip
            self.moved.setdefault(name, []).append(report)
            self.rows[name] = [one for one in self.rows[name] if one.id != gone]
        return httpx.Response(202, json={"data": []})

    def listing(self, listed: Sequence[msgspec.Struct]) -> httpx.Response:
        return httpx.Response(200, json={"data": msgspec.to_builtins(listed)})

    def guarantee(self, name: str, request: httpx.Request) -> httpx.Response:
        """As an agent does."""
        size = msgspec.json.decode(request.content)["guarantee_bytes"]
        instance = request.url.path.rpartition("/")[2]
        self.orders[-1] += f" {instance} {size}"
        (unit,) = [one.unit for one in self.rows[name] if one.id == instance]
        rest = [one for other, rows in self.rows.items() for one in rows
                if one.unit == unit and (other, one.id) != (name, instance)]  # fmt: skip
        others = [one.shared.guarantee_bytes for one in rest if one.shared]
        if sum(others) + size > self.arena:
            return httpx.Response(409, json={"error": {"message": "the unit has no room"}})
        self.share(name, instance, guarantee_bytes=size)
        return httpx.Response(200, json={"data": []})

    def move(self, name: str, body: dict[str, str]) -> httpx.Response:
        self.orders.append(f"move {name} {body['request_id']} {body['destination']}")
        if self.stay:
            return httpx.Response(200, json={"state": "aborted", "reason": "no_blocks"})
        moved = {one.id: one for one in self.requests[name]}[body["request_id"]]
        for instance, sign in ((moved.instance, -1), (body["destination"], 1)):
            (before,) = [one.shared for one in self.rows[name] if one.id == instance]
            assert before is not None
            self.share(name, instance, used_bytes=before.used_bytes + sign * moved.blocks)
        self.requests[name] = [
            replace(one, instance=body["destination"]) if one.id == moved.id else one
            for one in self.requests[name]
        ]
        return httpx.Response(200, json={"state": "committed"})

    def share(self, name: str, instance: str, **changed: int) -> None:
        self.rows[name] = [
            replace(one, shared=replace(one.shared or memory(0, 0), **changed))
            if one.id == instance
            else one
            for one in self.rows[name]
        ]


@asynccontextmanager
async def replacing(
    site: Site, target: UnitPlacement, said: list[str], nodes: Mapping[int, str] | None = None
) -> AsyncIterator[PlacementExecutor]:
    deployments = {
        name: DeploymentClient(
            name,
            f"http://{name}",
            token=site.token,
            unanswered=site.note_unanswered,
            settle=site.settle,
        )
        for name in site.rows
    }
    for name, one in deployments.items():
        await one.close()
        one._http = httpx.AsyncClient(
            transport=httpx.MockTransport(site.carry_out), base_url=f"http://{name}"
        )
    settings = ExecutorSettings(dict.fromkeys(site.rows, 1.0), patience_s=2.0, nodes=nodes or {})
    yield PlacementExecutor(target, deployments, settings, said.append)
    for one in deployments.values():
        await one.close()


async def carried_out(
    site: Site, target: UnitPlacement, nodes: Mapping[int, str] | None = None
) -> list[str]:
    """What was said on the way to the placement."""
    said: list[str] = []
    async with replacing(site, target, said, nodes) as it:
        await it.run()
    return said


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmig.placement.executor.AFTER_FAILURE_S", 0.01)


async def test_a_placement_is_reached_wave_by_wave() -> None:
    site, said = Site(left="a b", right="b c"), list[str]()
    async with replacing(site, placement(left="a c", right="a b"), said) as it:
        await it.run()
    assert site.places() == {"a": "left right", "b": "right", "c": "left"}
    assert [one for one in said if one.startswith("wave")]
    assert len(it.done) == len([one for one in said if one.startswith("wave")])


class RenewedSite(Site):
    """Deployments with which another contact begins after each order; they refuse those of earlier
    ones."""

    contact = 1

    def token(self) -> dict[str, str]:
        return {TOKEN_HEADER: str(OrderToken(7, self.contact))}

    async def carry_out(self, request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            if OrderToken.parse(request.headers[TOKEN_HEADER]).contact < self.contact:
                return httpx.Response(409, json={"error": {"message": "an earlier contact"}})
            self.contact += 1
        return await super().carry_out(request)


async def test_a_placement_is_reached_though_contacts_with_deployments_begin_again() -> None:
    site = RenewedSite(left="a b")
    said = await carried_out(site, placement(left="b", right="a"))
    assert site.places() == {"a": "right", "b": "left"}
    assert not [one for one in said if "the next plan follows" in one]


class LateSite(RenewedSite):
    """Deployments of which one carries out the first order without an answer, and late."""

    def __init__(self, **units: str) -> None:
        super().__init__(**units)
        self.late: list[httpx.Request] = []
        self.unsure = False
        self.renewals = 0
        self.swallowed = False
        self.away = 0
        """So many more contacts can't be made."""

    def note_unanswered(self) -> None:
        self.unsure = True

    async def settle(self) -> None:
        if self.unsure:
            if self.away:
                self.away -= 1
                raise StartupError("it reports nothing")
            self.contact, self.unsure = self.contact + 1, False
            self.renewals += 1

    async def carry_out(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and not self.swallowed:
            self.swallowed = True
            self.late.append(request)
            raise httpx.ReadTimeout("no answer")
        answer = await super().carry_out(request)
        if request.method == "GET" and request.url.path.endswith("/instances"):
            for one in self.late:  # just after what was seen
                await super().carry_out(one)
            self.late = []
        return answer


@pytest.mark.parametrize("away", [0, 2])
async def test_an_order_without_an_answer_is_not_done_twice(away: int) -> None:
    site = LateSite(left="a b", right="b")
    site.away = away
    await carried_out(site, placement(left="a b", right="a b"))
    assert site.places() == {"a": "left right", "b": "left right"}
    assert len(site.starts) == 1
    assert site.renewals == 1


class SlowSite(Site):
    """Deployments of which one refuses an order before another one has answered its own."""

    async def carry_out(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            if not self.starts:
                self.starts.append({})
                return httpx.Response(409, json={"error": {"message": "no free name"}})
            await asyncio.sleep(0.05)
        return await super().carry_out(request)


async def test_while_an_order_is_on_its_way_nothing_is_planned_again() -> None:
    site = SlowSite(left="a b", right="c")
    await carried_out(site, placement(left="a b", middle="a b", right="c"))
    assert site.places() == {"a": "left middle", "b": "left middle", "c": "right"}


def in_units(arena: int, **units: str) -> Site:
    """Such as left="a:300 b:100": instances with these guarantees."""
    site = Site()
    site.arena = arena
    for unit, models in units.items():
        for words in models.split():
            name, _, quota = words.partition(":")
            site.add(name, unit)
            site.share(name, site.rows[name][-1].id, guarantee_bytes=int(quota))
    return site


def guarantees(site: Site) -> dict[str, dict[str, int]]:
    return {
        name: {one.unit: one.shared.guarantee_bytes for one in rows if one.shared}
        for name, rows in site.rows.items()
    }


async def test_quotas_follow_the_placement_and_shrink_before_others_grow() -> None:
    site = in_units(400, left="a:300 b:100", right="a:400")
    await carried_out(site, placement(400, left="a:100 b:300", right="a:400"))
    assert site.orders == ["PATCH a i0 100", "PATCH b i1 300"]
    assert guarantees(site) == {"a": {"left": 100, "right": 400}, "b": {"left": 300}}


async def test_where_sizes_are_mixed_an_instance_starts_with_those_of_its_place() -> None:
    site = Site(u0="a")
    await carried_out(site, on_gpus("a:150@0", "a:400@1,2"))
    assert site.starts == [
        {
            "unit": "u1",
            "gpus": ["1", "2"],
            "flags": "--tensor-parallel-size=2 --kv-cache-memory-bytes=200",
        }
    ]


async def test_an_instance_starts_on_the_ray_node_of_its_unit() -> None:
    site = Site(u0="a")
    units = on_gpus("a@0", "a@1").units
    away = UnitPlacement([units[0], replace(units[1], node=1, gpus=[0])])
    await carried_out(site, away, {0: "aa", 1: "bb"})
    assert site.starts == [{"unit": "u1", "gpus": [], "node": "bb"}]


async def test_where_all_places_are_alike_an_instance_starts_as_its_deployment_has_it() -> None:
    site = Site(u0="a")
    await carried_out(site, on_gpus("a@0", "a@1"))
    assert site.starts == [{"unit": "u1", "gpus": ["1"]}]


@pytest.mark.parametrize("decode_share", [0, 60])
async def test_an_instance_starts_with_its_share_where_its_deployment_has_shares(
    decode_share: int,
) -> None:
    site = in_units(400, left="a:200", right="b:200")
    for name, instance in (("a", "i0"), ("b", "i1")):
        site.share(name, instance, decode_share=decode_share)
    units = [
        replace(unit, models=[replace(one, decode_share=0.35) for one in unit.models])
        for unit in placement(400, left="a:200 b:100", right="b:200").units
    ]
    async with replacing(site, UnitPlacement(units), list[str]()) as it:
        await it.run()
    (start,) = site.starts
    assert start.get("decode_share") == (40 if decode_share else None)


@pytest.mark.parametrize(
    ("share", "percent"), [(1.0, 100), (0.3, 30), (0.31, 40), (0.02, 10), (0.6999999, 70)]
)
def test_a_share_is_rounded_up_to_tenths(share: float, percent: int) -> None:
    assert tenths(share) == percent


async def test_a_quota_makes_room_for_a_model_that_comes() -> None:
    site = in_units(400, left="a:400", right="a:200 b:200")
    await carried_out(site, placement(400, left="a:250 b:150", right="a:400"))
    assert site.places() == {"a": "left right", "b": "left"}
    assert guarantees(site) == {"a": {"left": 250, "right": 400}, "b": {"left": 150}}
    first = site.orders.index("POST b")
    assert [one.split()[0] for one in site.orders[:first]] == ["PATCH"]


def with_requests() -> Site:
    """Model a has four requests in a unit, of which it uses all."""
    site = in_units(200, left="a:200", right="a:150 b:50")
    site.requests["a"] = [live(f"r{at}", "i0", "running", 50) for at in range(4)]
    site.rows["a"] = [replace(one, running=4) if one.id == "i0" else one for one in site.rows["a"]]
    site.share("a", "i0", used_bytes=200)
    return site


async def test_requests_leave_a_unit_for_a_model_that_comes() -> None:
    site = with_requests()
    await carried_out(site, placement(200, left="a:100 b:100", right="a:150 b:50"))
    moves = [one for one in site.orders if one.startswith("move")]
    assert moves[0] == "move a r0 i1"
    assert site.orders.index(moves[0]) < site.orders.index("POST b")
    assert guarantees(site) == {"a": {"left": 100, "right": 150}, "b": {"left": 100, "right": 50}}


async def test_requests_that_cannot_leave_are_not_moved_for_ever() -> None:
    site, said = with_requests(), list[str]()
    site.stay = True
    async with replacing(site, placement(200, left="a:100 b:100", right="a:150 b:50"), said) as it:
        with pytest.raises(ReplaceFailed, match="no request of a could leave left"):
            await it.run()


async def test_a_way_is_planned_by_what_the_last_drains_took_for_a_request() -> None:
    site = Site(left="a b", right="b c")
    site.rows["b"] = [row(one.id, one.unit, used=25, running=3) for one in site.rows["b"]]
    report = {"id": "m", "source": "i9", "state": "committed", "why": "drain"}
    site.moved["a"] = [report | {"total_ms": 2000.0, "ended_at": 1e9}]
    async with replacing(site, placement(left="a c", right="a b"), []) as it:
        first = (await it.waves())[0].steps[0]
    assert (first.kind, first.model) == ("drain", "b")
    assert first.seconds == pytest.approx(1.5 + 2.0), "three move at once, like one"


async def test_before_any_drain_it_is_planned_by_how_long_the_engines_steps_are() -> None:
    site = Site(left="a b", right="b c")
    site.rows["b"] = [row(one.id, one.unit, used=25, running=3) for one in site.rows["b"]]
    name = "vllm:inter_token_latency_seconds"
    site.metrics = f'{name}_sum{{engine="0"}} 20.0\n{name}_count{{engine="0"}} 100.0\n'
    async with replacing(site, placement(left="a c", right="a b"), []) as it:
        first = (await it.waves())[0].steps[0]
    assert first.seconds == pytest.approx(1.5 + 4 * handshake_s(0.2, 4))


async def test_what_a_drain_took_beside_its_requests_is_learnt() -> None:
    site = Site(left="a b", right="b c")
    site.drain_s = 0.01
    async with replacing(site, placement(left="a c", right="a b"), []) as it:
        await it.run()
        drained = [one.seconds for one in it.done if one.wave.steps[0].kind == "drain"]
        assert it.emptied_s == pytest.approx([one - 0.01 for one in drained], abs=0.05)


async def test_a_start_that_fails_is_taken_out_and_tried_again() -> None:
    site = Site(left="a", right="b")
    site.fail_starts = 2
    said = await carried_out(site, placement(left="a b", right="b"))
    assert site.places() == {"a": "left", "b": "left right"}
    assert sum("can't start" in one for one in said) == 2
    assert all(one.state == "serving" for rows in site.rows.values() for one in rows)


async def test_after_failures_in_a_row_it_gives_up_and_all_serve() -> None:
    site, said = Site(left="a", right="b"), list[str]()
    site.refuse = 100
    async with replacing(site, placement(left="a b", right="b"), said) as it:
        with pytest.raises(ReplaceFailed, match="given up after 5 failures: deployment b: no free"):
            await it.run()
    assert site.places() == {"a": "left", "b": "right"}


async def test_another_one_goes_on_where_one_was_killed() -> None:
    site, said = Site(left="a b", right="b c"), list[str]()
    target = placement(left="a c", right="a b")
    async with replacing(site, target, said) as it:
        running = asyncio.create_task(it.run())
        await until(lambda: site.orders != [])
        await cancel_tasks(running)
    async with replacing(site, target, said) as it:
        await it.run()
    assert site.places() == {"a": "left right", "b": "right", "c": "left"}


async def test_a_placement_without_a_way_is_refused_before_anything_is_done() -> None:
    site, said = Site(left="a b", right="c d"), list[str]()
    async with replacing(site, placement(left="a c", right="b d"), said) as it:
        with pytest.raises(ConfigError, match=r"can't start in unit .*, \S+ GiB are missing"):
            await it.run()
    assert site.orders == []


# -- the command


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ((), "--to gone.toml can't be read"),
        (("--deployment", "a"), "--deployment is 'a', must be NAME=URL"),
        (("--deployment", "c=localhost:80"), "must be NAME=http://HOST:PORT or NAME=/PATH"),
        (("--deployment", "b=http://h"), "--deployment is 'b=http://h', but b was given before"),
        (("--start", "b=0"), "--start is b='0', must be a or b, = and seconds above 0"),
        (("--start", "c=1"), "--start is c='1', must be a or b"),
        (("--drain", "nan"), "--drain is nan, must be a number above 0"),
        (("--request", "-1"), "--request is -1, must be a number above 0"),
        (("--node", "one=aa"), "--node is 'one'=..., must be a node's number, = and an id"),
        (("--bandwidth", "0"), "--bandwidth is 0, must be a number above 0"),
        (("--deployment", "c=http://h"), "deployment c has no place"),
    ],
)
def test_what_cant_be_used_is_refused_at_the_door(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], sentence: str
) -> None:
    file = tmp_path / "p.toml"
    file.write_text(
        "[[units]]\nname = 'left'\nmemory_bytes = 9\n"
        "[[units.models]]\nname = 'a'\nkv_bytes = 1\n[[units.models]]\nname = 'b'\nkv_bytes = 1\n"
    )
    usual = ["--deployment", "a=http://h", "--deployment", "b=/s"]
    target = str(file) if flags else "gone.toml"
    assert main(["--to", target, *usual, *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


# -- real servers


@contextmanager
def three_toys(folder: Path) -> Iterator[dict[str, Toys]]:
    """Of a, b and c, as the first placement below."""
    with ExitStack() as stack:
        found: dict[str, Toys] = {}
        for name, units in (("a", ["left"]), ("b", ["left", "right"]), ("c", ["right"])):
            own = folder / name
            own.mkdir()
            flags = [f"--instances={len(units)}", "--max-instances=4"]
            flags += [f"--instance-unit=i{at}: {unit}" for at, unit in enumerate(units)]
            found[name] = stack.enter_context(Toys(flags, own))
        yield found


def places(toys: dict[str, Toys]) -> dict[str, str]:
    return {
        name: " ".join(sorted(one["unit"] for one in it.get("instances")))
        for name, it in toys.items()
    }


def told(target: UnitPlacement, toys: dict[str, Toys], folder: Path) -> Sequence[str]:
    file = folder / "p.toml"
    file.write_text(to_toml(target))
    words = ["--to", str(file)]
    for name, it in toys.items():
        words += ["--deployment", f"{name}={it.url}"]
    return words


@pytest.mark.server
def test_no_order_is_given_where_a_fleets_server_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with three_toys(tmp_path) as toys, httpx.Client(timeout=60) as http:
        token = {TOKEN_HEADER: str(OrderToken(1, 1))}
        with http.stream("GET", f"{toys['c'].url}/kvmig/v1/events", headers=token) as contact:
            assert contact.status_code == 200
        before = places(toys)
        words = told(placement(left="a c", right="a b"), toys, tmp_path)
        assert main([*words, "--dry-run"]) == 0
        assert main(words) == 2
        assert places(toys) == before
    assert "deployment c takes no orders: " in (said := capsys.readouterr().err)
    assert "a fleet's server gives the orders here" in said


@pytest.mark.server
def test_three_servers_are_replaced_under_a_stream_which_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with three_toys(tmp_path) as toys, ExitStack() as stack:
        body = {"model": "toy", "prompt": "Count: 0017 0018", "max_tokens": 50, "stream": True,
                "temperature": 0}  # fmt: skip
        http = stack.enter_context(httpx.Client(timeout=60))
        with (
            toys["c"].held(20),
            http.stream("POST", f"{toys['c'].url}/v1/completions", json=body) as stream,
        ):
            lines = filter(None, stream.iter_lines())
            first = next(lines)
            words = told(placement(left="a c", right="a b"), toys, tmp_path)
            assert main([*words, "--dry-run"]) == 0
            assert places(toys) == {"a": "left", "b": "left right", "c": "right"}
            assert main(words) == 0
            assert places(toys) == {"a": "left right", "b": "right", "c": "left"}
            toys["c"].play(ToyScript())
            rest = [first, *lines]
    assert rest[-1] == "data: [DONE]"
    said = "".join(one.partition('"text":"')[2].partition('"')[0] for one in rest)
    assert said == "".join(f" {number:04}" for number in range(19, 32))[:50]
    assert "the placement is reached" in capsys.readouterr().out
