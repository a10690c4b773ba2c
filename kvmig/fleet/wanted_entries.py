"""The entries of the catalogue, taken by the models of the server, each alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from kvmig.core.clock import TimeSource
from kvmig.fleet.instance_measures import InstanceMeasures
from kvmig.fleet.lifecycle import ModelStatus
from kvmig.fleet.managed_model import CatalogEntry, ManagedModel
from kvmig.fleet.rollout_controller import ModelRollouts
from kvmig.fleet.round_faults import RoundFaults


class WantedEntries:
    """Knows which entries could not be taken yet."""

    def __init__(
        self,
        models: dict[str, ManagedModel],
        rollouts: ModelRollouts,
        measures: InstanceMeasures,
        faults: RoundFaults,
        clock: TimeSource,
    ) -> None:
        """models: the controller's, by their keys; changed here."""
        self._models = models
        self._rollouts = rollouts
        self._measures = measures
        self._faults = faults
        self._clock = clock
        self._untaken: dict[str, CatalogEntry] = {}

    def take_catalogue(self, named: Mapping[str, CatalogEntry], woken: Collection[str]) -> None:
        """Take these entries, in place of those before. woken: models that are to start at once
        where they are new."""
        for name, one in named.items():
            if name not in self._models:
                off = replace(one, on=False)  # until it is taken
                model = self._models[name] = ManagedModel(off, key=name)
                model.asked_until = math.inf if name in woken else model.asked_until
        self._untaken = dict(named)
        self.take_rest()

    def take_rest(self) -> None:
        """Take what is not taken yet. An entry that can't be taken is tried again in the next
        round; its model stays as it was."""
        for name, one in list(self._untaken.items()):
            model = self._models[name]
            with self._faults.guard("reading the catalogue", model):
                self._take_entry(model, one)
                del self._untaken[name]

    def _take_entry(self, model: ManagedModel, one: CatalogEntry) -> None:
        before = model.wanted
        try:
            model.wanted = self._rollouts.take_entry(one)
            is_new = before.spec != model.wanted.spec
            if is_new or not model.claim:
                self._measures.take_claim(model)
        except BaseException:
            model.wanted = before
            raise
        if before.spec.source != model.wanted.spec.source and model.life.state == "failed":
            model.life = ModelStatus(since=self._clock())  # what failed was something else
        if is_new:
            model.card = replace(model.card, reach=None)  # it may have another
