"""Looks at the nodes of a Ray cluster: one that fails is its node's alone."""

from __future__ import annotations

import errno
from unittest import mock

import msgspec
import pytest

from kvmig.launcher import ray_agents, ray_cluster
from kvmig.launcher.node_files import NodeWish
from kvmig.launcher.node_reports import NodeMeasure
from kvmig.launcher.ray_agents import NodeAgents, WatchedNode, checked_measure
from kvmig.launcher.ray_cluster import RayNode


class OtherMeasure(msgspec.Struct):
    """What the agent of another kvmig answers."""

    memory_total: int = 9
    memory_free: int = 5
    of_tomorrow: str = "x"


class OddMeasure(msgspec.Struct):
    """What can't be read here."""

    memory_total: str = "much"


def test_a_node_that_cannot_be_looked_at_keeps_no_other_one_from_being_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [RayNode(name, name, {}, {}) for name in "ab"]
    monkeypatch.setattr(ray_cluster, "nodes", lambda: nodes)
    asked: list[str] = []

    def ask_agent(self: WatchedNode, *_: object) -> None:
        asked.append(self.node.node_id)
        if self.node.node_id == "a":
            raise ZeroDivisionError

    monkeypatch.setattr(ray_agents.WatchedNode, "ask_agent", ask_agent)
    report = NodeAgents().look_at_nodes()
    assert asked == ["a", "b"]
    assert [(one.node_id, one.why) for one in report.nodes] == [
        ("a", "it can't be looked at: ZeroDivisionError()"),
        ("b", ""),
    ]


def test_an_answer_of_another_kvmig_is_taken_as_far_as_it_is_known() -> None:
    assert checked_measure(OtherMeasure()) == NodeMeasure(memory_total=9, memory_free=5)
    with pytest.raises(msgspec.ValidationError):
        checked_measure(OddMeasure())


def test_an_agent_that_can_not_measure_now_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another one in its place, all that it has started would end."""
    ray = pytest.importorskip("ray", reason="needs the extra kvmig[ray]")
    failed = OSError(errno.EMFILE, "Too many open files")

    def get(_: object) -> object:
        raise ray.exceptions.RayTaskError("measure", f"OSError: {failed}", failed)

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "remote", mock.MagicMock())
    watched = WatchedNode(RayNode("a" * 56, "a", {}, {}))
    watched.ask_agent(NodeWish(), {})
    agent = watched.agent
    assert agent is not None
    watched.take_answer()
    assert watched.agent is agent
    assert "Too many open files" in watched.report().why
