"""The workers of a fleet: the nodes of its Ray cluster as they are seen, and what is wanted of
them. Pure.

A worker is known by a name that it keeps when its node comes back, and Ray's id of the node shows
whether it is still the same one: Ray never counts a node as alive again that it has given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from kvmig.core.devices import DeviceRecord
from kvmig.launcher.node_files import FolderReport, NodeFilesReport
from kvmig.launcher.node_reports import ClusterReport, NodeReport, UnitReport

WorkerState = Literal["joining", "ready", "silent", "lost", "unknown"]
Leaving = Literal["", "drain", "lost"]

SILENT_S = 15.0
"""An agent without an answer for this time is silent: its worker gets no instance."""
LEASE_S = 10.0
"""Time from the loss of a node until its instances start elsewhere."""
SHORT = 6
"""Digits of a node's id behind a name that several nodes have, if they are enough."""
CORDONED = "it is cordoned"
NO_REPORT = "the Ray cluster does not answer"


class WorkerWish(msgspec.Struct, frozen=True, kw_only=True):
    """What is wanted of a worker; kept in the database, also while it is away."""

    name: str
    labels: Mapping[str, str] = {}
    cordoned: bool = False
    """Whether it gets no new instance."""
    drained_at: float | None = None
    """When its drain was ordered, in Unix time; None: it was not."""
    drain_until: float | None = None
    """The drain's deadline, in Unix time; None: there is none."""
    node: str = ""
    """Ray's id of the node that had the name when something was last ordered: of several nodes
    with one name, it is this one's."""


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker as it is now. Sizes are bytes."""

    name: str
    node: str = ""
    """Ray's id of the node; empty: it is away."""
    address: str = ""
    host: str = ""
    state: WorkerState = "joining"
    why: str = ""
    """Why it is not ready; empty: it is, or the reason is not known."""
    labels: Mapping[str, str] = field(default_factory=dict)
    cordoned: bool = False
    drained_at: float | None = None
    drain_until: float | None = None
    memory_total: int = 0
    memory_free: int = 0
    devices: tuple[DeviceRecord, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    """What the node has, by Ray's names."""
    free_resources: Mapping[str, float] = field(default_factory=dict)
    engines: tuple[str, ...] = ()
    """The engines that can start there; empty: not known."""
    fork_servers: Mapping[str, str] = field(default_factory=dict)
    """States of its fork servers, by engine: loading, ready, or why there is none."""
    files: NodeFilesReport = field(default_factory=NodeFilesReport)
    units: tuple[UnitReport, ...] = ()

    @property
    def refusal(self) -> str:
        """Why it gets no new instance; empty: it does."""
        if self.state != "ready":
            return f"it is {self.state}{f': {self.why}' if self.why else ''}"
        if self.drained_at is not None:
            return "it is being drained"
        return CORDONED if self.cordoned else ""


class WorkerTable:
    """What is seen and wanted of all workers, put together."""

    def __init__(self) -> None:
        self._report: ClusterReport | None = None
        self._wishes: Mapping[str, WorkerWish] = {}
        self._lost_at: dict[str, float] = {}
        """When nodes were first seen to be lost, by id."""
        self._gone_at: dict[str, float] = {}
        """When names were first asked for that no node had."""
        self._names: dict[str, str] = {}
        """Names that nodes were first seen under, by id: they keep them."""
        self._by_name: dict[str, FleetWorker] = {}
        self._by_node: dict[str, FleetWorker] = {}
        self.has_gpus = False
        """Whether a worker has GPUs, by Ray's word."""

    def take_wishes(self, wishes: Iterable[WorkerWish]) -> None:
        """Replace what is wanted."""
        self._wishes = {one.name: one for one in wishes}
        self._put_together()

    def take_report(self, report: ClusterReport | None, now: float) -> None:
        """Replace what is seen. None: nothing is. now: of any steady clock."""
        self._report = None if report is None or report.failed else report
        if self._report is not None:
            ordered = {one.node: one.name for one in self._wishes.values() if one.node}
            self._names = names_of(self._report.nodes, {**ordered, **self._names})
        for one in self._nodes():
            if not one.alive:
                self._lost_at.setdefault(one.node_id, now)
        self._put_together()

    def workers(self) -> list[FleetWorker]:
        """Every worker, by its name: also one that is away, and something is wanted of."""
        return list(self._by_name.values())

    def with_folder(self, folder: str) -> dict[str, FolderReport]:
        """What is known of a folder on each worker that has, or fetches it, by name."""
        found = {one.name: one.files.folder(folder) for one in self.workers()}
        return {name: one for name, one in found.items() if one is not None}

    def named(self, name: str) -> FleetWorker | None:
        """The worker of this name; None: there is none."""
        return self._by_name.get(name)

    def node(self, node: str) -> FleetWorker | None:
        """The worker with this node; None: there is none."""
        return self._by_node.get(node)

    def _put_together(self) -> None:
        """Make the workers once for many questions: each model asks for them in each round."""
        found: dict[str, FleetWorker] = {}
        self._by_node = {one.node_id: self._worker(one) for one in self._nodes()}
        for one in sorted(self._nodes(), key=lambda one: one.alive):  # who is alive comes last
            found[self._names[one.node_id]] = self._by_node[one.node_id]
        for name, wish in self._wishes.items():
            if name not in found:
                found[name] = _wanted(self._away(name), wish)
        self._by_name = {name: found[name] for name in sorted(found)}
        self.has_gpus = any(one.resources.get("GPU") for one in found.values())

    def _away(self, name: str) -> FleetWorker:
        if self._report is None:
            return FleetWorker(name, state="unknown", why=NO_REPORT)
        return FleetWorker(name, state="lost", why="no node has this name")

    def leaving(self, node: str, now: float) -> Leaving:
        """Why instances of this node are to be elsewhere; empty: they stay."""
        if not node or self._report is None:
            return ""
        worker = self.node(node)
        if worker is None or worker.state == "lost":
            # A server that has just started may not have seen it alive.
            lost_at = self._lost_at.setdefault(node, now)
            return "lost" if now - lost_at >= LEASE_S else ""
        return "drain" if worker.drained_at is not None else ""

    def is_gone(self, name: str, now: float) -> bool:
        """Whether no node has a worker's name, or its node was lost, longer ago than a lease."""
        if self._report is None:
            return False
        worker = self.named(name)
        if worker is not None and worker.node:
            self._gone_at.pop(name, None)
            return self.leaving(worker.node, now) == "lost"
        return now - self._gone_at.setdefault(name, now) >= LEASE_S

    def _nodes(self) -> Sequence[NodeReport]:
        return () if self._report is None else self._report.nodes

    def _worker(self, node: NodeReport) -> FleetWorker:
        name = self._names[node.node_id]
        measured, state = node.measured, state_of(node)
        worker = FleetWorker(
            name,
            node=node.node_id,
            address=node.address,
            host=node.host,
            state=state,
            why="" if state == "ready" else node.why,
            memory_total=0 if measured is None else measured.memory_total,
            memory_free=0 if measured is None else measured.memory_free,
            devices=() if measured is None else measured.devices,
            resources=node.total,
            free_resources=node.free,
            engines=() if measured is None else measured.engines,
            fork_servers={} if measured is None else measured.fork_servers,
            files=NodeFilesReport() if measured is None else measured.files,
            units=() if measured is None else measured.units,
        )
        wish = self._wishes.get(name)
        return worker if wish is None else _wanted(worker, wish)


def _wanted(worker: FleetWorker, wish: WorkerWish) -> FleetWorker:
    return replace(
        worker,
        labels=wish.labels,
        cordoned=wish.cordoned,
        drained_at=wish.drained_at,
        drain_until=wish.drain_until,
    )


def state_of(node: NodeReport) -> WorkerState:
    """The state of a node."""
    if not node.alive:
        return "lost"
    if node.silent_s > SILENT_S:
        return "silent"
    return "joining" if node.measured is None else "ready"


def names_of(nodes: Sequence[NodeReport], before: Mapping[str, str]) -> dict[str, str]:
    """The workers' names by nodes' ids: as a node was started with, else its host's; where several
    have one name, with the beginning of the id. A node keeps the name that it has."""
    usual = {one.node_id: _usual_name(one) for one in nodes}
    count = Counter(usual[one.node_id] for one in nodes if one.alive)
    return {
        node: before.get(node) or (name if count[name] < 2 else f"{name}-{_short(node, usual)}")
        for node, name in usual.items()
    }


def _short(node: str, others: Iterable[str]) -> str:
    """The beginning of a node's id, as long as no other node's begins so."""
    lengths = range(SHORT, len(node))
    others = [one for one in others if one != node]
    same = (one for one in lengths if not any(it.startswith(node[:one]) for it in others))
    return node[: next(same, len(node))]


def _usual_name(node: NodeReport) -> str:
    return node.name if node.name and node.name != node.address else node.host or node.address
