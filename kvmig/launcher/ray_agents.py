"""The agents of a Ray cluster: an actor on each node, which measures the node.

They belong to the process that has made them: Ray ends them with it, and starts one again that
dies. They take no resources, and get nothing that is secret. This module is imported on each node.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvmig.launcher import ray_cluster
from kvmig.launcher.environment import available_memory, total_memory
from kvmig.launcher.node_reports import ClusterReport, NodeMeasure, NodeReport
from kvmig.launcher.ray_cluster import RayNode
from kvmig.process.nvml import read_devices

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ANSWER_S = 1.0
"""Longest wait for the answers of one round; a later one counts in the next round."""
AGAIN_S = 5.0
"""Pause before an agent that could not be started is started again."""
MOST_LOST = 100
"""Lost nodes that are reported at most."""
RESTARTS = -1
"""Ray starts an agent again as often as it dies, as long as its node lives."""


class NodeAgent:
    """The actor's class."""

    def measure(self) -> NodeMeasure:
        """The node's memory and all its devices, as they are now."""
        # Ray hides the devices from an actor that takes none.
        environment = {one: it for one, it in os.environ.items() if one != "CUDA_VISIBLE_DEVICES"}
        inventory = read_devices(environment)
        return NodeMeasure(
            memory_total=total_memory(),
            memory_free=available_memory(),
            devices=inventory.devices,
            missing=inventory.missing,
        )


class WatchedNode:
    """A node with its agent."""

    def __init__(self, node: RayNode) -> None:
        self.node = node
        self._agent: ActorHandle | None = None
        self.asked: Any = None
        """The answer that is awaited; None: none is."""
        self._measured: NodeMeasure | None = None
        self._at = time.monotonic()
        self._why = ""
        self._again_at = 0.0

    def ask_agent(self) -> None:
        """Ask for a measurement, unless the last one has not been answered."""
        import ray

        if self.asked is not None or time.monotonic() < self._again_at:
            return
        if self._agent is None:
            self._agent = (
                ray.remote(NodeAgent)
                .options(
                    num_cpus=0,
                    max_restarts=RESTARTS,
                    scheduling_strategy=ray_cluster.strategy_of(self.node.node_id),
                )
                .remote()
            )
        self.asked = self._agent.measure.remote()

    def take_answer(self) -> None:
        """Take the answer that has come, or the reason why none will."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError

        asked, self.asked = self.asked, None
        try:
            self._measured = ray.get(asked)
        except ActorUnavailableError as error:  # Ray starts it again
            self._why = ray_cluster.last_line(error)
        except RayError as error:
            self._why = ray_cluster.last_line(error)
            self._agent, self._again_at = None, time.monotonic() + AGAIN_S
        else:
            self._at, self._why = time.monotonic(), ""

    def report(self) -> NodeReport:
        """What is known of it."""
        node = self.node
        return NodeReport(
            node_id=node.node_id,
            name=node.name,
            host=node.host,
            address=node.address,
            total=node.total,
            free=node.free,
            measured=self._measured,
            silent_s=time.monotonic() - self._at,
            why=self._why,
        )


class NodeAgents:
    """Make it once the cluster is joined, then `look_at_nodes` again and again. Its calls block."""

    def __init__(self) -> None:
        self._watched: dict[str, WatchedNode] = {}
        self._lost: dict[str, NodeReport] = {}

    def look_at_nodes(self) -> ClusterReport:
        """Start agents on nodes that have joined, and ask all for a measurement."""
        import ray

        alive = {one.node_id: one for one in ray_cluster.nodes()}
        for gone in [one for one in self._watched if one not in alive]:
            self._lost[gone] = replace(self._watched.pop(gone).report(), alive=False, free={})
        while len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        for node_id, node in alive.items():
            watched = self._watched.setdefault(node_id, WatchedNode(node))
            watched.node = node
            watched.ask_agent()
        waiting = {one.asked: one for one in self._watched.values() if one.asked is not None}
        if waiting:
            answered, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=ANSWER_S)
            for one in answered:
                waiting[one].take_answer()
        reports = [one.report() for one in self._watched.values()]
        return ClusterReport(nodes=(*reports, *self._lost.values()))
