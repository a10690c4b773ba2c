"""What is placed where: models with their rates, a cluster, and a plan. Pure.

A *unit* is a set of GPUs of one node that its members, instances of models, share; each member
runs on all of them (tensor parallel).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.placement.step_costs import DeviceCosts, load

Objective = Literal["paper", "requests", "slo"]
"""paper: sum of rate x throughput over models, as MuxServe's axis; requests: their throughput;
slo: those in time, the quicker the better, with half weight on what else would be if every rate
were 1.25 times as high."""
OBJECTIVES: tuple[Objective, ...] = ("paper", "requests", "slo")

MOST_GPUS = 4096


class ModelLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model and its load."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    model: str
    """Model whose costs it has: a name in the device's file."""
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    """Requests per second."""
    prompt_tokens: Annotated[float, msgspec.Meta(ge=1, le=1e7)] = 161.0
    """Mean; the default is ShareGPT's, as in MuxServe."""
    output_tokens: Annotated[float, msgspec.Meta(ge=1, le=1e7)] = 338.0
    output_cv: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.95
    """Standard deviation of the output's length / its mean."""

    @property
    def tokens(self) -> float:
        """Tokens of a mean request at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def context(self) -> float:
        """Mean tokens of a request that runs: long ones run longer, so there are more of them."""
        return self.prompt_tokens + self.output_tokens * (1 + self.output_cv**2) / 2


class GpuCluster(NamedTuple):
    """Nodes with the same number of GPUs of one kind."""

    nodes: int
    gpus: int
    """GPUs of one node."""
    device: DeviceCosts


class PlacedInstance(NamedTuple):
    """An instance: which model, and what part of its rate comes here."""

    llm: int
    """Index into the models."""
    rate: float
    """Requests per second."""


class GpuUnit(NamedTuple):
    """GPUs of one node, and who shares them; members in ascending order."""

    gpus: int
    members: tuple[PlacedInstance, ...]


Plan = tuple[GpuUnit, ...]


def ordered(units: Sequence[GpuUnit]) -> Plan:
    """The same plan, however its units were found: large ones first."""
    return tuple(sorted(units, key=lambda one: (-one.gpus, not one.members, one.members)))


def cluster_of(text: str) -> GpuCluster:
    """Parse NODESxGPUS:DEVICE, such as 4x8:a100-80g. Raises ConfigError."""
    shape = re.fullmatch(r"([0-9]{1,4})x([0-9]{1,4}):(.+)", text)
    if shape is None:
        raise ConfigError(
            f"--cluster is {text!r:.100}, must be NODESxGPUS:DEVICE such as 4x8:a100-80g"
        )
    nodes, gpus = int(shape[1]), int(shape[2])
    if min(nodes, gpus) < 1 or nodes * gpus > MOST_GPUS or gpus > 16:
        raise ConfigError(
            f"--cluster has {nodes} nodes of {gpus} GPUs, must have 1 to 16 GPUs a node and "
            f"{MOST_GPUS} in all at most"
        )
    return GpuCluster(nodes, gpus, load(shape[3]))


class _File(msgspec.Struct, forbid_unknown_fields=True):
    models: list[ModelLoad]


def models_of(text: str, where: str) -> list[ModelLoad]:
    """Models from TOML: a table [[models]] each. Raises ConfigError that names what is wrong."""
    try:
        models = msgspec.toml.decode(text, type=_File).models
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not models:
        raise ConfigError(f"{where}: models is empty, must have one model at least")
    names = [one.name for one in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{where}: name is {twice[0]!r} twice, each model needs its own")
    return models


def check(models: Sequence[ModelLoad], cluster: GpuCluster) -> None:
    """Whether each model runs on some unit of this cluster. Raises ConfigError: what is missing."""
    device = cluster.device
    for one in models:
        if one.model not in device.models:
            raise ConfigError(
                f"model {one.name}: model is {one.model!r:.100}, must be "
                f"{' or '.join(sorted(device.models))} on {device.name}"
            )
        cost = device.models[one.model]
        sizes = [size for size in cost.sizes if size <= cluster.gpus]
        if not sizes:
            raise ConfigError(
                f"model {one.name}: {one.model} needs {cost.sizes[0]} GPUs of one node, "
                f"a node has {cluster.gpus}"
            )
        missing = floor_bytes(one, device) - max(device.memory(size) for size in sizes)
        if missing > 0:
            raise ConfigError(
                f"model {one.name}: one instance with one request is {missing / 2**30:.1f} GiB "
                "larger than what a node's GPUs hold"
            )
    wanted = sum(floor_bytes(one, device) for one in models)
    missing = wanted - device.memory(cluster.nodes * cluster.gpus)
    if missing > 0:
        raise ConfigError(
            f"the models don't fit: weights, activations and one request each are "
            f"{missing / 2**30:.1f} GiB more than the cluster holds"
        )


def floor_bytes(llm: ModelLoad, device: DeviceCosts) -> float:
    """The least an instance needs: weights, activations, KV cache of one request."""
    return device.fixed_bytes(llm.model) + llm.tokens * device.models[llm.model].token_bytes
