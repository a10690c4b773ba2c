"""Whose instances can take whose requests."""

from __future__ import annotations

from msgspec.structs import replace

from kvmig.controlplane.dispatch import NewRequest, here_first
from kvmig.controlplane.fronts import FrontendRegistry
from kvmig.controlplane.joined_servers import JoinedServers
from kvmig.controlplane.messages import ClusterMember, LoadReport, Members
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.scheduler import rebalance
from kvmig.controlplane.view import ClusterView, InstanceView, ViewBuilder
from kvmig.core.config import SchedulerConfig
from kvmig.engines.base import FIRST_GUEST, EngineLoad

LOAD = EngineLoad(100, 10, 1, 0, 0, 0)


def report(
    instance: str, weights: str = "w", numerics: str = "n", likeness: str = "l"
) -> LoadReport:
    return LoadReport(
        instance, 0, LOAD, 0, 0, weights=weights, numerics=numerics, likeness=likeness
    )


def two_servers(*reports: LoadReport) -> JoinedServers:
    """Servers A and B, with an instance each, which have reported so."""
    servers = JoinedServers()
    for name in "ab":
        members = [ClusterMember(f"{name}-i0", f"tcp://{name}")]
        servers.put(name.encode(), Members(members, server=name.upper()))
    for one in reports:
        servers.learn(one)
    return servers


def test_instances_that_are_alike_are_named_to_the_other_server_with_theirs() -> None:
    servers = two_servers(report("a-i0"), report("b-i0"))

    assert servers.others_of(b"a") == Members([ClusterMember("b-i0", "tcp://b", server="B")])


def test_servers_that_are_unlike_learn_why() -> None:
    for there, why in (
        (report("b-i0", weights="v"), "its weights is v, here w"),
        (report("b-i0", numerics=""), "its numerics is unknown, here n"),
        (report("b-i0", likeness="k"), "its likeness is k, here l"),
    ):
        assert two_servers(report("a-i0"), there).others_of(b"a") == Members([], unlike={"B": why})


def test_the_policy_moves_requests_from_a_loaded_server_to_an_idle_one_that_is_alike() -> None:
    loaded = LoadReport("a-i0", 0, EngineLoad(100, 97, 9, 0, 0, 0), 0, 0)
    assert pairs_of_a_round(loaded, report("b-i0")) == [("a-i0", "b-i0")]


def test_the_policy_pairs_no_servers_that_are_unlike() -> None:
    loaded = LoadReport("a-i0", 0, EngineLoad(100, 97, 9, 0, 0, 0), 0, 0)
    for unlike in (("v", "n", "l"), ("w", "m", "l"), ("w", "n", "k")):
        assert pairs_of_a_round(loaded, report("b-i0", *unlike)) == []


def pairs_of_a_round(loaded: LoadReport, there: LoadReport) -> list[tuple[str, str]]:
    """What the scheduler decides for server A with this report, which is else as all are."""
    loaded = replace(loaded, weights="w", numerics="n", likeness="l")
    servers, builder = two_servers(loaded, there), ViewBuilder()
    builder.members(servers.members())
    for one in (loaded, there):
        builder.report(servers.told_apart(one), 0.0)
    rounds = policy_of(SchedulerConfig()).rounds
    assert rounds is not None
    return [(one.source, one.destination) for one in rebalance(builder.view(0.0), (), rounds)]


def test_an_instance_that_has_not_reported_is_neither_alike_nor_unlike() -> None:
    assert two_servers(report("a-i0")).others_of(b"a") == Members([])
    assert two_servers(report("b-i0")).others_of(b"a") == Members([])


def test_a_server_whose_last_instance_has_ended_is_what_it_was() -> None:
    servers = two_servers(report("a-i0"), report("b-i0"))
    servers.others_of(b"a")

    servers.put(b"a", Members([], server="A"))

    assert [one.instance for one in servers.others_of(b"a").members] == ["b-i0"]


def test_a_server_that_is_gone_is_named_no_more() -> None:
    servers = two_servers(report("a-i0"), report("b-i0"))

    assert servers.drop(b"b") == "B"

    assert servers.others_of(b"a") == Members([])
    assert [one.instance for one in servers.members()] == ["a-i0"]


def test_a_launcher_without_a_server_is_told_of_no_others() -> None:
    servers = JoinedServers()
    servers.put(b"launcher", Members([ClusterMember("i0", "tcp://i0")]))

    assert servers.joined == []
    assert servers.launchers == [b"launcher"]


def test_front_ends_of_other_servers_get_no_statistics() -> None:
    fronts = FrontendRegistry()
    fronts.join("theirs", b"theirs", guest=True)
    assert fronts.client(0) is None

    fronts.join("ours", b"ours")

    assert fronts.client(0) == b"ours"
    assert fronts.number(b"theirs") >= FIRST_GUEST > fronts.number(b"ours")
    assert fronts.client(fronts.number(b"theirs")) == b"theirs"


def instance(name: str, state: str = "serving", weights: str = "w") -> InstanceView:
    return InstanceView(
        instance=name,
        endpoint=f"tcp://{name}",
        load=EngineLoad(100, 10, 1, 0, 0, 0),
        state=state,
        weights=weights,
        reported_at=0.0,
    )


def chosen(*instances: InstanceView) -> list[str]:
    """Of these, with b and c at other servers, those that may take the request."""
    view = ClusterView(0.0, instances)
    return [one.instance for one in here_first(view, NewRequest(1.0), {"b", "c"}, "w").instances]


def test_a_new_request_goes_to_this_servers_instances_while_one_serves() -> None:
    assert chosen(instance("a"), instance("b")) == ["a"]


def test_a_new_request_goes_to_guests_of_its_weights_once_none_serves_here() -> None:
    draining = instance("a", state="draining")

    assert chosen(draining, instance("b"), instance("c", weights="v")) == ["a", "b"]
