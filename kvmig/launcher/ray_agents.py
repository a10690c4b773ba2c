"""The agents of a Ray cluster: an actor on each node, which measures the node, has models' files
there, and keeps the fork servers of its instances and the agents of its units.

They belong to the process that has made them: Ray ends them with it, and starts one again that
dies. They take no resources, and get nothing that is secret. Files go from agent to agent through
Ray. This module is imported on each node.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from kvmig.core.order_fence import NO_TOKEN
from kvmig.launcher import ray_cluster
from kvmig.launcher.environment import available_memory, total_memory
from kvmig.launcher.node_fence import FenceUnknown, NodeFence
from kvmig.launcher.node_files import (
    ClusterWish,
    FilesWish,
    NodeFilesReport,
    NodeWish,
    WantedFolder,
)
from kvmig.launcher.node_folders import NodeFolders
from kvmig.launcher.node_forks import NodeForks, node_folder
from kvmig.launcher.node_reports import ClusterReport, NodeMeasure, NodeReport, UnitReport
from kvmig.launcher.node_units import NodeUnits
from kvmig.launcher.ray_cluster import RayNode
from kvmig.launcher.ray_environment import THREADS, forwarded
from kvmig.launcher.ray_gpus import RayHolders
from kvmig.launcher.unit_gpus import UnitGpus
from kvmig.process.fork_server import HUB_TOKEN
from kvmig.process.nvml import read_devices
from kvmig.sources.file_list import SourceFailure
from kvmig.sources.files_folder import FilesManifest

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
FILES = "files"
"""The threads of an agent that answer other agents."""
FENCE_LOOK_S = 1.0
"""Pause between two looks whether a later server leads."""
READERS = 8
"""Their number."""
READ_S = 60.0
"""Longest wait for a piece of a file."""
DIGEST_S = 600.0
"""Longest wait for the digest of a file."""
MOST_HOLDERS = 4
"""Nodes that a node may fetch a folder from."""
ENGINES = {"vllm": "vllm", "transformers": "transformers", "toy": "kvmig"}
"""The library that each engine needs."""


Kept = TypeVar("Kept")

log = logging.getLogger(__name__)


class NodeAgent:
    """The actor's class."""

    def __init__(self) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        self._folders = NodeFolders()
        self._forks = NodeForks(node)
        self._units = NodeUnits(node, gpus=UnitGpus(RayHolders(node), time.monotonic))
        self._fence = NodeFence(node_folder(node))
        self._engines = [one for one, library in ENGINES.items() if find_spec(library)]
        self._turn = threading.Lock()
        self._wish = NodeWish()
        """The last one that was carried out."""
        threading.Thread(target=self._watch_fence, name="fence", daemon=True).start()

    def measure(self, wish: NodeWish, holders: Mapping[str, Sequence[ActorHandle]]) -> NodeMeasure:
        """The node's memory, all its devices, its files and its fork servers, as they are now.
        wish: what it is to have; holders: agents of nodes that have its files, by folder."""
        # Ray hides the devices from an actor that takes none.
        environment = {one: it for one, it in os.environ.items() if one != "CUDA_VISIBLE_DEVICES"}
        inventory = read_devices(environment)
        measured = NodeMeasure(
            memory_total=total_memory(),
            memory_free=available_memory(),
            devices=inventory.devices,
            missing=inventory.missing,
            engines=tuple(self._engines),
        )
        with self._turn:
            try:
                refused = self._fence.refuse(wish.fleet, wish.token)
            except FenceUnknown as error:
                return replace(measured, refused=str(error))
            if refused:
                self._let_go()
                return replace(measured, refused=refused)
            self._wish = wish
            engines = [one for one in wish.engines if one in self._engines]
            others = {folder: list(map(AgentHolder, each)) for folder, each in holders.items()}
            return replace(
                measured,
                files=_kept_alone(
                    lambda: self._folders.take_wish(wish.files, others),
                    lambda why: NodeFilesReport(why=f"its files: {why}"),
                ),
                fork_servers=_kept_alone(
                    lambda: self._forks.keep_engines(wish.fleet, engines, wish.environment),
                    lambda why: dict.fromkeys(engines, why),
                ),
                units=_kept_alone(
                    lambda: self._units.keep_units(wish.units, wish.fleet),
                    lambda why: tuple(UnitReport(path=one.path, why=why) for one in wish.units),
                ),
            )

    def _watch_fence(self) -> None:
        """Let go of the node once a later server leads, also while no wish comes any more."""
        while True:
            time.sleep(FENCE_LOOK_S)
            with self._turn, suppress(FenceUnknown):
                held = self._wish
                if held.token != NO_TOKEN and self._fence.refuse(held.fleet, held.token):
                    self._let_go()

    def _let_go(self) -> None:
        """Change nothing on the node any more, and leave its folder to others."""
        self._wish = NodeWish()
        for close in (self._folders.close, self._forks.close, self._units.close):
            _kept_alone(close, lambda why: None)

    def list_files(self, folder: str) -> FilesManifest:
        """See `FolderHolder`; other agents call it."""
        return self._folders.list_files(folder)

    def digest_file(self, folder: str, name: str) -> str:
        """See `FolderHolder`; other agents call it."""
        return self._folders.digest_file(folder, name)

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        """See `FolderHolder`; other agents call it."""
        return self._folders.read_file(folder, name, begin, count)


def _kept_alone(keep: Callable[[], Kept], failed: Callable[[str], Kept]) -> Kept:
    """Keep one part of a node. A failure is its own, and the next wish tries it again: the agent
    goes on, which all that it has started would end with. failed: the report, given the reason."""
    try:
        return keep()
    except Exception as error:
        log.exception("a part of this node can't be kept now")
        return failed(f"the node's agent failed: {error!r}")


class AgentHolder:
    """Implements `FolderHolder`: the agent of another node."""

    def __init__(self, agent: ActorHandle) -> None:
        self._agent = agent

    def list_files(self, folder: str) -> FilesManifest:
        """See `FolderHolder`."""
        asked = self._agent.list_files.options(concurrency_group=FILES).remote(folder)
        found: FilesManifest = _answer(asked)
        return found

    def digest_file(self, folder: str, name: str) -> str:
        """See `FolderHolder`."""
        method = self._agent.digest_file.options(concurrency_group=FILES)
        found: str = _answer(method.remote(folder, name), DIGEST_S)
        return found

    def read_file(self, folder: str, name: str, begin: int, count: int) -> bytes:
        """See `FolderHolder`."""
        method = self._agent.read_file.options(concurrency_group=FILES)
        found: bytes = _answer(method.remote(folder, name, begin, count))
        return found


def _answer(asked: Any, timeout_s: float = READ_S) -> Any:
    """What another agent answers. Raises SourceFailure."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(asked, timeout=timeout_s)
    except RayTaskError as error:
        if isinstance(error.cause, SourceFailure):
            raise error.cause from error
        raise SourceFailure(f"the agent of another node failed: {error.cause!r}") from error
    except RayError as error:
        why = f"the agent of another node does not answer: {ray_cluster.last_line(error)}"
        raise SourceFailure(why) from error


class WatchedNode:
    """A node with its agent."""

    def __init__(self, node: RayNode) -> None:
        self.node = node
        self._agent: ActorHandle | None = None
        self.asked: Any = None
        """The answer that is awaited; None: none is."""
        self._measured: NodeMeasure | None = None
        self.refused = ""
        """Why the last wish was refused; empty: it was not."""
        self._at = time.monotonic()
        self._why = ""
        self._again_at = 0.0

    @property
    def agent(self) -> ActorHandle | None:
        """The node's agent; None: there is none yet, or no more."""
        return self._agent

    @property
    def measured(self) -> bool:
        """Whether the agent has carried out a wish, and has answered."""
        return self._measured is not None

    def lacks(self, one: WantedFolder) -> bool:
        """Whether it is not known to have a folder."""
        if self._measured is None:
            return True
        found = self._measured.files.folder(one.folder, one.revision)
        return found is None or found.state != "whole"

    def holds(self, one: WantedFolder) -> bool:
        """Whether others can read a folder there."""
        sees_all = self._measured is not None and self._measured.files.origin
        return self._agent is not None and (sees_all or not self.lacks(one))

    def ask_agent(self, wish: NodeWish, holders: Mapping[str, Sequence[ActorHandle]]) -> None:
        """Ask for a measurement, unless the last one has not been answered."""
        import ray

        if self.asked is not None or time.monotonic() < self._again_at:
            return
        if self._agent is None:
            self._agent = (
                ray.remote(concurrency_groups={FILES: READERS})(NodeAgent)
                .options(
                    num_cpus=0,
                    max_restarts=RESTARTS,
                    scheduling_strategy=ray_cluster.strategy_of(self.node.node_id),
                )
                .remote()
            )
        self.asked = self._agent.measure.remote(wish, holders)

    def give_up(self, error: Exception) -> None:
        """Know that the node could not be looked at now; another agent is asked after a pause."""
        self._why, self.asked = f"it can't be looked at: {error!r}", None
        self._agent, self._again_at = None, time.monotonic() + AGAIN_S

    def take_answer(self) -> None:
        """Take the answer that has come, or the reason why none will."""
        import ray
        from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

        asked, self.asked = self.asked, None
        try:
            measured = checked_measure(ray.get(asked))
        except (ActorUnavailableError, RayTaskError) as error:
            # Ray starts it again; or it is there, and could not measure: what it keeps would end.
            self._why = ray_cluster.last_line(error)
        except RayError as error:
            self._why = ray_cluster.last_line(error)
            self._agent, self._again_at = None, time.monotonic() + AGAIN_S
        else:
            self.refused = measured.refused
            if measured.refused:
                self._why = measured.refused
                return
            self._measured, self._at, self._why = measured, time.monotonic(), ""

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


@contextmanager
def _alone(watched: WatchedNode) -> Iterator[None]:
    """Look at one node. A failure is its own: the other nodes are looked at all the same."""
    try:
        yield
    except Exception as error:
        log.exception("node %s can't be looked at now", watched.node.node_id)
        watched.give_up(error)


def checked_measure(found: object) -> NodeMeasure:
    """What an agent has answered, which may be one of another kvmig. Raises msgspec's
    ValidationError."""
    return msgspec.convert(msgspec.to_builtins(found), NodeMeasure)


class NodeAgents:
    """The agents of all nodes. Make it once the cluster is joined, and call `look_at_nodes` at
    intervals; calls block."""

    def __init__(self) -> None:
        self._watched: dict[str, WatchedNode] = {}
        self._lost: dict[str, NodeReport] = {}
        self._wish = ClusterWish()
        self._requested: tuple[Mapping[str, float], ...] | None = None

    def take_wish(self, wish: ClusterWish) -> None:
        """Let nodes have other files, from the next look on. May be called from any thread."""
        self._wish = wish

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
        wish = self._wish
        environment = forwarded({THREADS: str(wish.threads), **os.environ})
        environment.pop(HUB_TOKEN, None)  # an agent gets no secret
        for node_id in alive:
            with _alone(self._watched[node_id]):
                own = wish.of_node(node_id, environment)
                self._watched[node_id].ask_agent(own, self._holders(node_id, own.files))
        waiting = {one.asked: one for one in self._watched.values() if one.asked is not None}
        if waiting:
            answered, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=ANSWER_S)
            for one in answered:
                with _alone(waiting[one]):
                    waiting[one].take_answer()
        if wish.bundles is not None and wish.bundles != self._requested and self._leads():
            ray_cluster.request_nodes(wish.bundles)
            self._requested = wish.bundles
        reports = [one.report() for one in self._watched.values()]
        return ClusterReport(nodes=(*reports, *self._lost.values()))

    def _leads(self) -> bool:
        """Whether agents have answered, and none of them knows of a later server."""
        known = [one for one in self._watched.values() if one.measured or one.refused]
        return bool(known) and not any(one.refused for one in known)

    def _holders(self, node_id: str, wish: FilesWish) -> dict[str, list[ActorHandle]]:
        """Agents from which a node can fetch what it lacks, by folder."""
        lacking = [one for one in wish.folders if self._watched[node_id].lacks(one)]
        others = [one for name, one in self._watched.items() if name != node_id]
        found = {}
        for folder in lacking:
            agents = [one.agent for one in others if one.holds(folder) and one.agent is not None]
            found[folder.folder] = random.sample(agents, min(len(agents), MOST_HOLDERS))
        return found
