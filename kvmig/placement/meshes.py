"""How a cluster's GPUs can be cut into units: sizes only. Pure.

Equal nodes and equal units are interchangeable, so a group of meshes is the sorted tuple of its
sizes: 165 for 4 nodes of 8 GPUs, where MuxServe goes through 715.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Group = tuple[int, ...]
"""Sizes of all units, descending."""


def partitions(gpus: int, sizes: tuple[int, ...]) -> Iterator[Group]:
    """Every way to cut a node of `gpus` into units of these sizes (descending, 1 among them)."""
    if not sizes:
        if gpus == 0:
            yield ()
        return
    first, rest = sizes[0], sizes[1:]
    for count in range(gpus // first, -1, -1):
        for tail in partitions(gpus - count * first, rest):
            yield (first,) * count + tail


def sizes_within(gpus: int) -> tuple[int, ...]:
    """Unit sizes on a node: powers of two, descending."""
    return tuple(1 << bit for bit in range(gpus.bit_length() - 1, -1, -1))


def groups(nodes: int, gpus: int) -> list[Group]:
    """Every group of meshes of a cluster, the coarsest first."""
    node = list(partitions(gpus, sizes_within(gpus)))
    found: set[Group] = {()}
    for _ in range(nodes):
        found = {tuple(sorted(one + more, reverse=True)) for one in found for more in node}
    return sorted(found, reverse=True)


def neighbours(group: Group) -> list[Group]:
    """Groups in which one unit is halved."""
    found = set[Group]()
    for size in set(group):
        if size > 1:
            rest = list(group)
            rest.remove(size)
            found.add(tuple(sorted([*rest, size // 2, size // 2], reverse=True)))
    return sorted(found, reverse=True)


def packs(sizes: Iterable[int], nodes: int, gpus: int) -> bool:
    """Whether units of these sizes lie each in one node. The largest first, where there is room:
    that is optimal for sizes that divide each other."""
    room = [gpus] * nodes
    for size in sorted(sizes, reverse=True):
        at = next((at for at, free in enumerate(room) if free >= size), None)
        if at is None:
            return False
        room[at] -= size
    return True
