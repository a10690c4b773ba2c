"""A model as the server keeps it: what is wanted of it, what is known of it, what it takes."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvmig.core.api_records import InstanceRow
from kvmig.core.config import instance_name
from kvmig.fleet.autoscale import DemandWindow, ScalingDecision, ScalingRule
from kvmig.fleet.deployments import DeploymentWatcher
from kvmig.fleet.flag_rolls import RolledStart, RollStep
from kvmig.fleet.instance_additions import InstanceAdditions
from kvmig.fleet.instance_nodes import InstanceNodes
from kvmig.fleet.instance_places import InstancePlaces
from kvmig.fleet.lifecycle import ModelStatus, State
from kvmig.fleet.orders import DeploymentEnded
from kvmig.fleet.rollout import instance_start, need_of
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.room_moves import RoomMove
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.units import UnitRecord
from kvmig.proxy.messages import ModelCard

STARTS = 9
"""Number of start times whose median is sent to waiting clients."""


class CatalogEntry(msgspec.Struct, frozen=True):
    """A model of the catalogue."""

    model_id: str
    """Another model that has the name later has another one."""
    name: str
    revision: int
    on: bool
    spec: ModelSpec
    rollout: StoredRollout | None = None
    """How far it is on its way to this revision; None: it is there."""


class DeploymentRecord(msgspec.Struct, frozen=True):
    """What the supervisor keeps of a deployment for the next server."""

    model_id: str
    model: str
    revision: int
    socket: str
    gpus: Mapping[str, tuple[str, ...]] = {}
    """UUIDs of the GPUs of its first instances, by name."""
    gpu_bytes: int = 0
    """Bytes that each of them may take of each of its GPUs."""
    unit: str = ""
    """The unit that it is in; empty: none."""
    unit_bytes: int = 0
    """Bytes of the unit's KV cache."""
    folder: str = ""
    """The folder with its weights."""
    nodes: Mapping[str, str] = {}
    """Ids of the Ray nodes of its first instances, by name."""
    spec: ModelSpec | None = None
    """What it was started as; None: by a kvmig that didn't say."""
    agents: tuple[UnitRecord, ...] = ()
    """The units of a placement whose agents its instances may join."""


def record_of(
    wanted: CatalogEntry,
    socket: str,
    gpus: Sequence[tuple[str, ...]],
    gpu_bytes: int,
    unit_bytes: int,
    nodes: Sequence[str],
    agents: tuple[UnitRecord, ...],
) -> DeploymentRecord:
    """The record of a deployment that starts. gpus, nodes: of its first instances."""
    return DeploymentRecord(
        wanted.model_id,
        wanted.name,
        wanted.revision,
        socket,
        {instance_name(at): one for at, one in enumerate(gpus)},
        gpu_bytes,
        wanted.spec.unit,
        unit_bytes,
        wanted.spec.folder,
        {instance_name(at): one for at, one in enumerate(nodes)},
        wanted.spec,
        agents,
    )


class MissingFiles(msgspec.Struct, frozen=True):
    """Why a model can't start yet."""

    why: str
    failed: bool
    """Whether the last try to fetch them has failed."""


class ModelEvent(msgspec.Struct, frozen=True):
    """Something that was decided or that happened."""

    at: float
    """Unix time."""
    model: str
    what: str


@dataclass(eq=False)
class ManagedModel:
    """A model of the fleet."""

    wanted: CatalogEntry
    key: str = ""
    """The name; of a deployment next to another one of the same model, with the revision."""
    retires: bool = False
    """Whether it gets no new requests, and ends after those that it has."""
    overdue: bool = False
    """Whether these have had their time."""
    rolls: bool = False
    """Whether its instances are to start again as something else, one after the other."""
    rolled_last: RollStep | None = None
    """What was asked for last."""
    cant_roll: tuple[RolledStart, str] | None = None
    """The start that its instances can't make, and why."""
    stands_by: bool = False
    """Whether it has an instance without demand: requests are to come to it."""
    claim: int = 0
    """Bytes of an instance."""
    parked_claim: int = 0
    """The same, parked."""
    beside_kv: int = 0
    """Most bytes of the host's memory that an instance of the deployment took apart from its KV
    cache; 0: not known."""
    places: InstancePlaces = field(default_factory=InstancePlaces)
    """GPUs of its instances."""
    nodes: InstanceNodes = field(default_factory=InstanceNodes)
    """Workers' nodes of its instances."""
    stays: str = ""
    """Why instances of it stay on a worker that is drained, or was lost; empty: none does."""
    departing: dict[str, float | None] = field(default_factory=dict)
    """Instances that this server has drained because of their workers, by name, with the deadline
    of the worker's drain then."""
    additions: InstanceAdditions = field(default_factory=InstanceAdditions)
    life: ModelStatus = field(default_factory=ModelStatus)
    scaling: ScalingDecision | None = field(default_factory=ScalingDecision)
    """What was decided last; None: by a server before this one."""
    window: DemandWindow = field(default_factory=DemandWindow)
    deployment: str = ""
    """Empty: none runs, nor is one ordered."""
    note: DeploymentRecord | None = None
    pid: int = 0
    watched: DeploymentWatcher | None = None
    card: ModelCard = field(default_factory=ModelCard)
    """What its last deployment said of it; kept while there is none."""
    ended: DeploymentEnded | None = None
    """End of the last deployment, until a round has seen it."""
    asked_until: float = -math.inf
    """Time until which a request for it counts, since it was at zero."""
    busy_at: float = 0.0
    """When it last had a request, or began to serve."""
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS))
    """Seconds that its last starts took."""
    ordering: asyncio.Task[None] | None = None
    moving: tuple[RoomMove, ...] = ()
    """Instances that move so that another model has room, until they are gone."""
    moves_at: float = -math.inf
    """Time from which on others may move."""
    failed_moves: int = 0
    """Moves in a row that have failed."""
    removed: bool = False
    """Whether the catalogue has it no more; it is forgotten once nothing runs."""
    asks_since: float | None = None
    """Time since which it would start, or wake, if it had room."""
    lacks_room: bool = False
    """Whether it waits for room, and for nothing else that keeps it from its start."""
    refused: str = ""
    """Why it was not parked, or did not wake."""
    unrouted_at: int = 0
    """Version of the routes from which on proxies send it nothing."""
    entered: Counter[State] = field(default_factory=Counter)
    evicted: int = 0
    """Times that it ended to make room."""
    scaled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Decisions about its instances, by way and reason."""

    @property
    def rule(self) -> ScalingRule:
        """Rule of its instances, where the target isn't freeness."""
        spec = self.wanted.spec
        counts = spec.instances
        kind: Literal["concurrency", "rps"] = (
            "rps" if counts.target_kind == "rps" else "concurrency"
        )
        return ScalingRule(spec.least, counts.max, counts.target, kind)

    @property
    def serving(self) -> int:
        """Instances that serve."""
        return 0 if self.watched is None else self.watched.serving

    @property
    def ready(self) -> int:
        """Instances that new calls can go to: those of a removed model of this name take none."""
        return 0 if self.former else self.serving

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.life.state == "serving" and self.ready > 0

    @property
    def former(self) -> bool:
        """Whether what runs is of a removed model that had this name; it ends first."""
        return self.note is not None and self.note.model_id != self.wanted.model_id

    @property
    def unit(self) -> str:
        """The unit that it is in, or would start in; empty: none."""
        return self.wanted.spec.unit if self.note is None else self.note.unit

    @property
    def agents(self) -> tuple[UnitRecord, ...]:
        """The units of a placement whose agents its instances may join."""
        return () if self.note is None else self.note.agents

    @property
    def is_newest(self) -> bool:
        """Whether what runs is as it would be started now, or its instances can become so."""
        if self.note is None:
            return False
        if self.note.spec is None:
            return self.note.revision == self.wanted.revision
        return need_of(self.note.spec, self.wanted.spec) in ("nothing", "roll")

    @property
    def instance_start(self) -> RolledStart | None:
        """The start of its instances that is wanted; None: they can't become what is wanted."""
        if self.note is None or self.note.spec is None:
            return None
        return instance_start(self.note.spec, self.wanted.spec)

    @property
    def socket(self) -> str:
        """The path of its deployment's; empty: there is none."""
        return "" if self.note is None else self.note.socket

    @property
    def planned(self) -> int:
        """Instances that it has and that were ordered, or with which it would start."""
        if not self.deployment:
            return max(1, self.wanted.spec.least)
        return max(1, self.desired, len(self.instance_rows))

    @property
    def desired(self) -> int:
        """Instances that it is to have."""
        if not self.deployment:
            return 0
        return len(self.instance_rows) if self.scaling is None else self.scaling.wanted

    @property
    def claimed(self) -> int:
        """Bytes that its deployment takes, and what was ordered of it."""
        if not self.deployment:
            return 0
        match self.life.state:
            case "parked":
                claim = self.parked_claim
            case "parking" | "waking":
                claim = max(self.claim, self.parked_claim)
            case _:
                claim = self.claim
        return claim * self.planned

    @property
    def more_parked(self) -> int:
        """Bytes that it takes of the host more once it is parked; 0 or less: none."""
        return (self.parked_claim - self.claim) * self.planned

    @property
    def instance_rows(self) -> Sequence[InstanceRow]:
        """Rows of its instances, as its deployment reports them."""
        return () if self.watched is None else self.watched.told.data

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes that its instances take of each GPU."""
        return (
            self.places.held(self.instance_rows, self.life.state == "parked")
            if self.deployment
            else {}
        )

    @property
    def is_ordering(self) -> bool:
        """Whether an order about its instances is being carried out."""
        return self.ordering is not None and not self.ordering.done()

    @property
    def instance_gpus(self) -> list[tuple[str, ...]]:
        """GPUs of each of its instances; on a CPU none of each."""
        if not self.deployment:
            return []
        return self.places.gpus(self.instance_rows) or [()] * self.planned

    @property
    def start_s(self) -> float | None:
        """How long it takes to start, by experience."""
        return statistics.median(self.starts) if self.starts else None
