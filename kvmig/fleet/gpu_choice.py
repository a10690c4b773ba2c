"""Chooses the number of GPUs of models' instances where their specifications leave it open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_places import ModelPlaces
from kvmig.fleet.tensor_parallel import is_open, sized
from kvmig.fleet.worker_nodes import WorkerNode


class GpuChoice:
    """The choice for all models: made before a start, kept as long as the deployment runs."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        places: ModelPlaces,
        chosen: Callable[[ManagedModel], None],
    ) -> None:
        """chosen: takes the sizes of a model whose number of GPUs has changed."""
        self._models = models
        self._places = places
        self._chosen = chosen

    def choose(self, nodes: Sequence[WorkerNode], first: Callable[[ManagedModel], int]) -> None:
        """Put the number into what is wanted of each model that runs, or asks for its start.

        first: the instances with which one starts.
        """
        for model in self._models.values():
            spec = model.wanted.spec
            if not is_open(spec):
                continue
            if model.note is not None:
                started = model.note.spec
                chosen = sized(spec, 1 if started is None else started.workers)
            elif model.asks_since is not None:
                chosen = self._places.with_gpus(spec, first(model), nodes)
            else:
                continue
            if chosen != spec:
                model.wanted = replace(model.wanted, spec=chosen)
                self._chosen(model)
