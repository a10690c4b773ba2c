"""How good a place is for an instance: the formulas that GPUStack publishes. Pure.

They are those of gpustack/gpustack, `gpustack/policies/scorers/placement_scorer.py` and
`model_file_locality_scorer.py`, read at 01729271 and 0caab006: SPREAD and BINPACK of at most 100,
and 5 more where the model's files are on the node's disk.

In SPREAD a node without instances is worth 100. Otherwise it is worth 90 with instances of other
models alone, 80 with instances of the same model alone, and 70 with both; and each chosen GPU adds
a part of 10, the less the more instances it has. In BINPACK it is the part of what is free that the
instance takes, where a GPU's memory counts twice as much as the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

MOST = 100.0
ONLY_OTHERS, ONLY_OWN, BOTH = 90.0, 80.0, 70.0
BAND = 10.0
"""What the chosen GPUs add at most, all together."""
OTHERS_WEIGHT = 0.2
"""What an instance of another model counts, where one of the same model counts 1."""
DEVICE_WEIGHT, MEMORY_WEIGHT = 2, 1
LOCALITY = 5.0

Counts = Mapping[str, int]
"""Instances by GPU; those without one under `NO_GPU`."""


def spread_base(own: Counts, every: Counts) -> float:
    """What the node is worth before its GPUs are looked at. own, every: instances there."""
    mine = sum(own.values())
    others = sum(every.values()) - mine
    if not mine and not others:
        return MOST
    return ONLY_OTHERS if not mine else ONLY_OWN if not others else BOTH


def spread_part(base: float, own: int, others: int) -> float:
    """What a GPU adds, or a node without one, by the instances there: a part of 1."""
    if base == MOST:
        return 0.0
    if not own and not others:
        return 1.0
    if base == ONLY_OTHERS:
        return 1 / (others + 1)
    if base == ONLY_OWN:
        return 1 / (own + 1)
    return 1 / ((own + 1) + (others + 1) * OTHERS_WEIGHT)


def spread_score(own: Counts, every: Counts, gpus: Sequence[str], devices: int) -> float:
    """SPREAD of a candidate. gpus: the chosen ones; none: it runs on the CPU.

    devices: number of the node's GPUs.
    """
    base = spread_base(own, every)
    if not gpus:  # all instances of the node count, wherever they are
        mine = sum(own.values())
        return base + BAND * spread_part(base, mine, sum(every.values()) - mine)
    step = BAND / (devices + 1)
    parts = (spread_part(base, mine := own.get(gpu, 0), every.get(gpu, 0) - mine) for gpu in gpus)
    return base + sum(step * part for part in parts)


def binpack_score(memory: int, memory_free: int, each: int, frees: Iterable[int]) -> float:
    """BINPACK of a candidate: the fullest of its GPUs counts. each: bytes of each of its GPUs.

    frees: bytes that are free there; none: it runs on the CPU.
    """
    of_memory = memory / memory_free * MOST if memory_free > 0 else 0.0
    of_gpus = [each / free * MOST if free > 0 else 0.0 for free in frees]
    if not of_gpus:
        return of_memory
    weights = MEMORY_WEIGHT + DEVICE_WEIGHT
    return (of_memory * MEMORY_WEIGHT + max(of_gpus) * DEVICE_WEIGHT) / weights


def locality_score(source: str, files: Iterable[str]) -> float:
    """What it adds that the model's files are on the node's disk."""
    return LOCALITY if source and source in files else 0.0
