"""Why a node can't have an instance: each filter with its reason, in bytes where it is of bytes.
Pure.

`admits` is the same in short, without reasons, for decisions over many nodes: of the filters that
need no look at what is free.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvmig.fleet import device_room
from kvmig.fleet.device_room import DeviceNeed
from kvmig.fleet.worker_nodes import InstanceNeed, NodeRoom, WorkerNode
from kvmig.launcher.ray_resources import amounts

FilterName = Literal[
    "ready", "cordon", "labels", "engine", "files", "memory", "resources", "gpus", "gpu_memory",
    "peers"
]  # fmt: skip
TINY = 1e-6
"""Amounts that differ by less are equal."""


class FilterRefusal(msgspec.Struct, frozen=True):
    """A filter that refuses a node."""

    filter: FilterName
    why: str
    need_bytes: int = 0
    """What it needs; 0: the filter is not of bytes."""
    free_bytes: int = 0
    """What is free of that."""


def admits(node: WorkerNode, need: InstanceNeed) -> bool:
    """Whether the node is refused by none of the filters that need no look at what is free."""
    if node.unready or node.cordoned or (node.engines and need.engine not in node.engines):
        return False
    if need.source in node.no_files:
        return False
    if not need.selector:
        return True
    return all(node.labels.get(name) == value for name, value in need.selector.items())


def most_on(room: NodeRoom, need: InstanceNeed, want: DeviceNeed | None, most: int) -> int:
    """How many instances find room together on a node that is admitted, up to `most`."""
    if most * need.memory > room.memory:
        most = max(0, room.memory) // need.memory if need.memory else most
    for name, amount in need.resources.items():
        if amount > 0:
            most = min(most, max(0, int((room.resources.get(name, 0.0) + TINY) / amount)))
    if want is None or most < 1:
        return most
    if not room.devices or max(room.devices.values()) < want.each:
        return 0
    if most == 1 == want.devices and not want.only:  # the usual case, over many nodes
        return 1
    return device_room.most_instances(room.devices, want, room.node.groups, most)


def refusals(room: NodeRoom, need: InstanceNeed, *, holders: bool = False) -> list[FilterRefusal]:
    """List the filters that refuse the node; none: it can have the instance.

    holders: whether to name who has a GPU's memory.
    """
    found = refused_node(room.node, need)
    if need.memory > max(0, room.memory):
        found.append(
            FilterRefusal(
                "memory",
                f"memory: needs {need.memory} bytes, {max(0, room.memory)} of {room.node.total} are"
                " free",
                need.memory,
                max(0, room.memory),
            )
        )
    for name, amount in need.resources.items():
        if (free := room.resources.get(name, 0.0)) + TINY < amount:
            there = f"{amounts({name: max(0.0, free)})} free of {amounts({name: amount})}"
            found.append(FilterRefusal("resources", f"it has {there}"))
    of_gpus = [_refused_devices(room, want, holders) for want in need.wants]
    if None not in of_gpus:
        found += [one for one in of_gpus if one is not None]
    return found


def refused_node(node: WorkerNode, need: InstanceNeed) -> list[FilterRefusal]:
    """The filters that refuse the node without a look at what is free there."""
    found: list[FilterRefusal] = []
    if node.unready:
        found.append(FilterRefusal("ready", node.unready))
    if node.cordoned:
        found.append(FilterRefusal("cordon", "it is cordoned"))
    for name, value in sorted(need.selector.items()):
        if (has := node.labels.get(name)) != value:
            label = "no label" if has is None else f"{has!r:.100} for label"
            found.append(
                FilterRefusal("labels", f"it has {label} {name}, must have {value!r:.100}")
            )
    if node.engines and need.engine not in node.engines:
        there = ", ".join(sorted(node.engines))
        why = f"engine {need.engine} can't start there, only {there}"
        found.append(FilterRefusal("engine", why))
    if (no_files := node.no_files.get(need.source)) is not None:
        found.append(FilterRefusal("files", no_files))
    return found


def _refused_devices(room: NodeRoom, want: DeviceNeed, holders: bool) -> FilterRefusal | None:
    allowed = [gpu for gpu in room.devices if want.allows(gpu)]
    if len(allowed) < want.devices:
        there = f"{len(allowed)} {'of its gpus' if want.only else 'GPUs'}"
        return FilterRefusal("gpus", f"{there} are there, it needs {want.devices}")
    frees = sorted((room.devices[gpu] for gpu in allowed), reverse=True)
    if (best := frees[want.devices - 1]) < want.each:
        each = "; ".join(
            f"{one.title}: needs {want.each} bytes, {max(0, room.devices[one.id])} of {one.total}"
            f" are free{device_room.holders_of(one) if holders else ''}"
            for one in room.node.devices
            if one.id in allowed and room.devices[one.id] < want.each
        )
        return FilterRefusal("gpu_memory", each, want.each, max(0, best))
    if device_room.most_instances(room.devices, want, room.node.groups, 1) < 1:
        return FilterRefusal(
            "peers",
            f"no {want.devices} GPUs that reach each other have {want.each} bytes free each",
            want.each,
        )
    return None
