"""The number of GPUs of an instance where the specification leaves it to the fleet. Pure.

Candidates come by preference, as in GPUStack: one GPU, then 2, 4 and so on of one node. The first
that has room for all instances now is taken; else the first that would have room on empty nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.fleet.place_choice import most_instances
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.worker_nodes import InstanceNeed, Rooms

MOST_GPUS = 64
"""More than a node has today."""


def is_open(spec: ModelSpec) -> bool:
    """Whether the fleet chooses the number."""
    return spec.tensor_parallel == "auto"


def sized(spec: ModelSpec, gpus: int) -> ModelSpec:
    """The specification with that number of GPUs."""
    return replace(spec, gpus_per_instance=gpus)


def candidates(most: int, heads: int) -> tuple[int, ...]:
    """The numbers of GPUs to try, the preferred one first. most: GPUs that an instance may have.
    heads: attention heads of the model, which are divided evenly; 0: not known."""
    powers = (1 << power for power in range(max(1, most).bit_length()))
    return tuple(one for one in powers if one == 1 or not heads % one)


def every_size(spec: ModelSpec) -> tuple[ModelSpec, ...]:
    """The specification as an instance may start by it: with each number of GPUs where the fleet
    chooses, else as it is."""
    if not is_open(spec):
        return (spec,)
    return (spec, *(sized(spec, one) for one in candidates(MOST_GPUS, 0)))


def choose_gpus(
    sizes: Sequence[int],
    need: Callable[[int], InstanceNeed],
    now: Rooms,
    empty: Rooms,
    instances: int,
) -> int:
    """The number of GPUs of each instance. need: of an instance with that number. now: what is
    free; empty: what there is without any model."""
    for rooms in (now, empty):
        for one in sizes:
            if most_instances(rooms, need(one), instances) >= instances:
                return one
    return sizes[-1]


def split(sizes: ModelSizes, gpus: int) -> ModelSizes:
    """The sizes of each worker by those of an only one: all is divided evenly."""
    return replace(
        sizes,
        weights=-(-sizes.weights // gpus),
        workers=gpus,
        shortest=-(-sizes.shortest // gpus),
        reserved=-(-sizes.reserved // gpus),
        layers=tuple(_part(one, gpus) for one in sizes.layers),
    )


def _part(one: LayerSizes, gpus: int) -> LayerSizes:
    return replace(one, token=-(-one.token // gpus), request=-(-one.request // gpus))
