"""The live picture: what runs, as parts of a page, and what differs between two pictures. Pure.

A region of the page is made again when the parts that it has are others; as long as they are the
same ones, only those that differ are. Streams are dots: of many a sample, always of the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from typing import Any, NamedTuple
from zlib import crc32

from kvmig.core.live_records import LiveDevice, LiveFleet, LiveInstance, LiveModel, LiveMove
from kvmig.pages.words import percent_of

MOST_DOTS = 400
"""Dots of a picture."""
MOST_MOVES = 12
"""Migrations that are listed."""
NO_GPU = "CPU"
HERE = "local"
"""Worker of the instances on the server's host."""


class ModelPart(NamedTuple):
    """A model's row."""

    key: str
    name: str
    state: str
    why: str
    serving: int
    desired: int
    running: int
    held: int


class InstancePart(NamedTuple):
    """An instance's box."""

    key: str
    model: str
    id: str
    state: str
    detail: str
    filled: int
    """Percent of its KV cache that is in use."""
    running: int
    waiting: int
    leaving: int
    """Requests that move away now."""
    coming: int


class DevicePart(NamedTuple):
    """The head of a GPU, or of several that instances use together."""

    key: str
    title: str
    total: int
    """Bytes; 0: not known."""
    taken: int
    claims: tuple[tuple[str, int], ...]
    others: int


class DeviceGroup(NamedTuple):
    """The instances on the same GPUs."""

    head: DevicePart
    instances: tuple[InstancePart, ...]


class WorkerGroup(NamedTuple):
    """What is on one worker."""

    name: str
    groups: tuple[DeviceGroup, ...]


class MovePart(NamedTuple):
    """A migration that has ended."""

    model: str
    source: str
    destination: str
    state: str
    reason: str
    ms: float
    pause_ms: float | None
    bytes: int
    at: float


class LivePicture(NamedTuple):
    """A picture of a fleet."""

    models: tuple[ModelPart, ...]
    workers: tuple[WorkerGroup, ...]
    moves: tuple[MovePart, ...]
    dots: Mapping[str, tuple[str, ...]]
    """Ids of streams by the keys of their instances."""
    streams: int
    """Streams, those without a dot included."""


class PictureChange(NamedTuple):
    """What differs from the picture before."""

    regions: tuple[str, ...]
    """Regions with other parts than before: models, workers, moves."""
    models: tuple[ModelPart, ...]
    """Rows that differ, of regions that aren't made again; as the others."""
    instances: tuple[InstancePart, ...]
    devices: tuple[DevicePart, ...]
    dots: Mapping[str, tuple[str, ...]]
    """Dots of instances where they differ; none of those that are gone."""
    said: tuple[str, ...]
    """What a reader who sees no colours is to know."""

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return any(self)


def picture_of(fleet: LiveFleet) -> LivePicture:
    """The picture of what runs."""
    return LivePicture(
        models=tuple(map(model_part, sorted(fleet.models, key=lambda one: one.name))),
        workers=worker_groups(fleet.instances, fleet.devices),
        moves=tuple(map(move_part, fleet.moves[:MOST_MOVES])),
        dots=dots_of(fleet),
        streams=max(len(fleet.streams), sum(one.running for one in fleet.models)),
    )


def change_of(before: LivePicture, now: LivePicture) -> PictureChange:
    """What differs between two pictures."""
    regions = []
    models = instances = devices = ()
    if [one.key for one in before.models] != [one.key for one in now.models]:
        regions.append("models")
    else:
        models = others(before.models, now.models)
    if _frame(before) != _frame(now):
        regions.append("workers")
    else:
        instances = others(_instances(before), _instances(now))
        devices = others(_devices(before), _devices(now))
    if before.moves != now.moves:
        regions.append("moves")
    dots = {key: ids for key, ids in now.dots.items() if before.dots.get(key) != ids}
    states = {one.key: one.state for one in before.models}
    said = tuple(
        f"{one.name}: {one.state}" for one in now.models if states.get(one.key) != one.state
    )
    return PictureChange(tuple(regions), models, instances, devices, dots, said)


def others(before: Iterable[Any], now: Iterable[Any]) -> tuple[Any, ...]:
    """The parts of the second that are not as in the first."""
    return tuple(one for was, one in zip(before, now, strict=True) if was != one)


def _frame(picture: LivePicture) -> object:
    """What the region of workers is made of."""
    return [
        (one.name, [(group.head.key, [box.key for box in group.instances]) for group in one.groups])
        for one in picture.workers
    ]


def _instances(picture: LivePicture) -> list[InstancePart]:
    return [box for one in picture.workers for group in one.groups for box in group.instances]


def _devices(picture: LivePicture) -> list[DevicePart]:
    return [group.head for one in picture.workers for group in one.groups]


# -- parts


def model_part(one: LiveModel) -> ModelPart:
    """The row of a model."""
    counts = one.serving, one.desired, one.running, one.held
    return ModelPart(f"m:{one.name}", one.name, one.state, one.why, *counts)


def instance_key(one: LiveInstance) -> str:
    """The key of an instance's box."""
    return f"i:{one.model}/{one.deployment}/{one.row.id}"


def instance_part(one: LiveInstance) -> InstancePart:
    """The box of an instance."""
    row = one.row
    return InstancePart(
        key=instance_key(one),
        model=one.model,
        id=row.id,
        state=row.state,
        detail=row.detail,
        filled=round(percent_of(row.blocks_used, row.blocks_total)),
        running=row.running,
        waiting=row.waiting,
        leaving=row.migrations_out,
        coming=row.migrations_in,
    )


def worker_groups(
    instances: Sequence[LiveInstance], devices: Sequence[LiveDevice]
) -> tuple[WorkerGroup, ...]:
    """The instances by workers and GPUs. devices: of the server's host and of workers; each is
    shown, with or without an instance."""
    boxes: dict[tuple[str, tuple[str, ...]], list[InstancePart]] = {}
    for one in instances:
        boxes.setdefault((one.worker, one.gpus), []).append(instance_part(one))
    known = {one.title: one for one in devices}
    for title, device in known.items():
        if not any(title in gpus for _, gpus in boxes):
            boxes[device.worker or HERE, (title,)] = []
    workers: dict[str, list[DeviceGroup]] = {}
    for (worker, gpus), found in sorted(boxes.items()):
        head = device_part(worker, gpus, [known[one] for one in gpus if one in known])
        found.sort(key=lambda box: box.key)
        workers.setdefault(worker, []).append(DeviceGroup(head, tuple(found)))
    return tuple(WorkerGroup(name, tuple(groups)) for name, groups in workers.items())


def device_part(worker: str, gpus: Sequence[str], known: Sequence[LiveDevice]) -> DevicePart:
    """The head of a group of instances."""
    title = ", ".join(gpus) or NO_GPU
    claims: dict[str, int] = {}
    for one in known:
        for name, size in one.models.items():
            claims[name] = claims.get(name, 0) + size
    return DevicePart(
        key=f"g:{worker}/{title}",
        title=title,
        total=sum(one.total_bytes for one in known),
        taken=sum(one.total_bytes - one.free_bytes for one in known),
        claims=tuple(sorted(claims.items())),
        others=sum(one.others_bytes for one in known),
    )


def move_part(one: LiveMove) -> MovePart:
    """The line of a migration."""
    move = one.move
    return MovePart(
        one.model, move.source, move.destination, move.state, move.reason, move.total_ms,
        move.pause_ms, move.bytes, move.ended_at,
    )  # fmt: skip


def dots_of(fleet: LiveFleet) -> dict[str, tuple[str, ...]]:
    """The dots of each instance; instances without streams have none."""
    keys = {(one.model, one.deployment, one.row.id): instance_key(one) for one in fleet.instances}
    found = (
        (crc32(f"{one.model} {one.row.id}".encode()), key)
        for one in fleet.streams
        if (key := keys.get((one.model, one.deployment, one.row.instance))) is not None
    )
    dots: dict[str, list[str]] = {key: [] for key in keys.values()}
    for number, key in sorted(nsmallest(MOST_DOTS, found)):
        dots[key].append(f"{number:08x}")
    return {key: tuple(ids) for key, ids in dots.items()}
