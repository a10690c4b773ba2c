"""What a server needs to join others, and what can't join."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from kvmig.controlplane.messages import ClusterMember, ClusterMessage, Members
from kvmig.core.background import cancel_tasks
from kvmig.core.config import (
    ClusterConfig,
    JoinConfig,
    RayConfig,
    ScalingConfig,
    SchedulerConfig,
    UnitConfig,
    check,
    instance_number,
)
from kvmig.core.errors import ConfigError
from kvmig.launcher.join_link import JoinLink, address_towards, endpoint_of, join_of
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.zmq_sockets import RpcServer
from tests.support.waiting import until

if TYPE_CHECKING:
    from kvmig.launcher.cluster import InstanceManager

JOINED = JoinConfig(scheduler="tcp://127.0.0.1:8100", server="3fa01b7c")


@pytest.mark.parametrize(
    "text",
    ["127.0.0.1:8100", "tcp://127.0.0.1", "tcp://:8100", "tcp://a:b", "tcp://a:1/b", "unix:", "x"],
)
def test_an_endpoint_of_another_form_is_refused_by_name(text: str) -> None:
    said = f"KVMIG_JOIN is {text!r}, must be tcp://HOST:PORT or unix:PATH"

    with pytest.raises(ConfigError, match=re.escape(said)):
        join_of({"KVMIG_JOIN": text, "KVMIG_SECRET": "a secret of 16 b"})


def test_an_endpoint_is_a_port_or_a_path() -> None:
    assert endpoint_of("--listen", "tcp://10.0.0.1:8100") == "tcp://10.0.0.1:8100"
    assert endpoint_of("--listen", "unix:/run/kvmig.sock") == "ipc:///run/kvmig.sock"


def test_a_server_joins_with_a_secret_alone() -> None:
    with pytest.raises(ConfigError, match="KVMIG_SECRET is not set"):
        join_of({"KVMIG_JOIN": "tcp://127.0.0.1:8100"})


def test_without_the_variable_a_server_joins_nothing() -> None:
    assert join_of({"KVMIG_SECRET": "a secret of 16 b"}) is None


def test_control_sockets_are_bound_where_the_scheduler_is_reached() -> None:
    assert address_towards("ipc:///run/kvmig.sock") == "127.0.0.1"
    assert address_towards("tcp://127.0.0.2:8100").startswith("127.0.0.")
    with pytest.raises(ConfigError, match="whose host can't be used"):
        address_towards("tcp://no-such-host.invalid:8100")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ray", RayConfig(address="auto"), "--ray is auto"),
        ("unit", UnitConfig(path="/run/unit"), "--unit is /run/unit"),
        ("scaling", ScalingConfig(low=3, high=9), "--autoscale is 3,9"),
        ("scheduler", SchedulerConfig(migration=False), "--no-migration is given"),
    ],
)
def test_what_does_not_go_with_other_servers_is_refused_by_name(
    field: str, value: object, said: str
) -> None:
    config = msgspec.structs.replace(ClusterConfig(join=JOINED), **{field: value})

    with pytest.raises(ConfigError, match=f"{said}, must be left out with KVMIG_JOIN"):
        check(config)


def test_instances_of_joined_servers_have_names_of_their_own() -> None:
    config = ClusterConfig(join=JOINED)

    assert config.public_name("i3") == "3fa01b7c-i3"
    assert config.own_name("3fa01b7c-i3") == "i3"
    assert config.own_name("77777777-i3") == "77777777-i3"
    assert instance_number("3fa01b7c-i3") == instance_number("i3") == 3
    assert ClusterConfig().public_name("i3") == ClusterConfig().own_name("i3") == "i3"


class FailingCluster:
    """In place of a server's instances: what is told of others fails once, in an unforeseen way."""

    def __init__(self) -> None:
        self.refusals = RefusalCounter()
        self.on_change: list[object] = []
        self.on_evacuate: list[object] = []
        self.taken: list[list[ClusterMember]] = []
        self._fails = True

    def members(self) -> list[ClusterMember]:
        return []

    def set_guests(self, guests: list[ClusterMember], unlike: dict[str, str]) -> None:
        if self._fails:
            self._fails = False
            raise ZeroDivisionError
        self.taken.append(guests)


async def test_a_server_joins_again_after_an_unforeseen_failure() -> None:
    secret, cluster = b"a secret of 16 b", FailingCluster()
    server = RpcServer(secret, "scheduler", "scheduler", ClusterMessage, host="127.0.0.1")
    join = JoinConfig(scheduler=server.endpoint, server="3fa01b7c")
    link = JoinLink(join, secret, "toy", cast("InstanceManager", cluster))

    async def name_another() -> None:
        async for sender, message, _ in server.messages():
            if isinstance(message, Members):
                server.send(sender, Members([ClusterMember("77777777-i0", "tcp://x:1")]))

    naming = asyncio.create_task(name_another())
    link.open()
    try:
        await until(lambda: cluster.taken)
    finally:
        await link.close()
        await cancel_tasks(naming)
        server.close()
    assert [one.instance for one in cluster.taken[0]] == ["77777777-i0"]
