"""What instances are measured to take of GPUs and of the host, for the estimates of all models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmig.core.clock import TimeSource
from kvmig.fleet.device_watch import DeviceSample
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.round_faults import RoundFaults
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.units import FleetUnits

PART = "measuring"
"""The name of this part of a round."""


class InstanceMeasures:
    """The measures of all models' instances."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        memory: MemoryBudget,
        wall: TimeSource,
        note: Callable[[ManagedModel, str], None],
        measured: Callable[[ModelSpec], object],
        units: FleetUnits,
    ) -> None:
        """wall: Unix time. note: called with what people may want to know of a model. measured:
        called when more is known of what a model takes."""
        self._models = models
        self._memory = memory
        self._wall = wall
        self._note = note
        self._measured = measured
        self._units = units
        self._sample = memory.devices.watch.sample
        self._folders_changed = memory.devices.folders.changes
        self._in_units: dict[str, tuple[int, int]] = {}
        """Bytes of a GPU that models of units used at the last look, and how many they had leased,
        by their names."""

    def take_claim(self, model: ManagedModel) -> None:
        """Take what an instance of it is known to need of the host's memory."""
        model.claim = self._memory.claim(model.wanted.spec)
        model.parked_claim = self._memory.parked(model.wanted.spec)

    def measure(self, faults: RoundFaults) -> None:
        """Take what instances use of their GPUs, as of the last look at these, and of the host. A
        model that can't be measured keeps no other one from it."""
        for model in self._models.values():
            with faults.guard(PART, model):
                self._measure_host(model, faults)
        if self._folders_changed != (changes := self._memory.devices.folders.changes):
            self._folders_changed = changes
            self._take_claims(faults)
        watch = self._memory.devices.watch
        if watch.sample is self._sample:
            return
        before, self._sample = self._sample, watch.sample
        if _gpus(before) != _gpus(self._sample):  # of a worker that has joined, or has left
            self._take_claims(faults)
        for model in self._models.values():
            with faults.guard(PART, model):
                self._measure_gpus(model)

    def _measure_gpus(self, model: ManagedModel) -> None:
        if model.agents:  # it may have instances in several units, which lease under one name
            return
        if model.unit:
            self._measure_in_unit(model)
            return
        devices, spec = self._memory.devices, model.wanted.spec
        for name, used in model.places.measure(model.instance_rows, self._sample.used_by).items():
            if model.is_newest and devices.measure(spec, used, self._wall()):
                self._note(model, f"instance {name} uses {used} bytes of a GPU")
                self._measured(spec)

    def _take_claims(self, faults: RoundFaults) -> None:
        for model in self._models.values():
            with faults.guard(PART, model):
                self.take_claim(model)

    def _measure_in_unit(self, model: ManagedModel) -> None:
        """Take what its instance uses besides the unit's KV cache. The agent is asked at other
        times than the driver, so nothing counts unless both have said the same twice."""
        name, spec = model.wanted.name, model.wanted.spec
        leased = self._units.leased(model.unit).get(name)
        found = [
            (one.id, self._sample.used_by(gpu, [one.pid]))
            for one in model.instance_rows
            if one.state == "serving" and one.pid
            for gpu in model.places.gpus_of(one)
        ]
        before = self._in_units.pop(name, None)
        if leased is None or len(found) != 1:
            return
        ((instance, used),) = found
        self._in_units[name] = used, leased
        if not model.is_newest or used <= leased or before != (used, leased):
            return
        devices, own = self._memory.devices, used - leased
        if devices.measure_in_unit(spec, own, self._wall()):
            self._note(model, f"instance {instance} uses {own} bytes of a GPU besides its lease")
            self._measured(spec)

    def _measure_host(self, model: ManagedModel, faults: RoundFaults) -> None:
        most = max((one.beside_kv for one in model.instance_rows), default=0)
        if most <= model.beside_kv or not model.is_newest:
            return
        spec = model.wanted.spec
        is_more = self._memory.measure(spec, most, self._wall())
        model.beside_kv = most
        if is_more:
            self._note(model, f"an instance takes {most} bytes of the host without its KV cache")
            self._measured(spec)
            self._take_claims(faults)


def _gpus(sample: DeviceSample) -> set[str]:
    return {one.uuid for one in sample.inventory.devices}
