"""What instances are measured to take of GPUs and of the host, for the estimates of all models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvmig.core.clock import Clock
from kvmig.fleet.device_watch import DeviceSample
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.spec import ModelSpec


class InstanceMeasures:
    """The measures of all models' instances."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        memory: MemoryBudget,
        wall: Clock,
        note: Callable[[ManagedModel, str], None],
        measured: Callable[[ModelSpec], object],
    ) -> None:
        """wall: Unix time. note: called with what people may want to know of a model. measured:
        called when more is known of what a model takes."""
        self._models = models
        self._memory = memory
        self._wall = wall
        self._note = note
        self._measured = measured
        self._sample = memory.devices.watch.sample

    def take_claim(self, model: ManagedModel) -> None:
        """Take what an instance of it is known to need of the host's memory."""
        model.claim = self._memory.claim(model.wanted.spec)
        model.parked_claim = self._memory.parked(model.wanted.spec)

    def measure(self) -> None:
        """Take what instances use of their GPUs, as of the last look at these, and of the host."""
        for model in list(self._models.values()):
            self._measure_host(model)
        devices = self._memory.devices
        if devices.watch.sample is self._sample:
            return
        before, self._sample = self._sample, devices.watch.sample
        if _gpus(before) != _gpus(self._sample):  # of a worker that has joined, or has left
            for model in self._models.values():
                self.take_claim(model)
        for model in self._models.values():
            spec = model.wanted.spec
            if model.unit or model.agents:  # what it uses is the unit's KV cache, too
                continue
            for name, used in model.places.measure(
                model.instance_rows, self._sample.used_by
            ).items():
                if model.is_newest and devices.measure(spec, used, self._wall()):
                    self._note(model, f"instance {name} uses {used} bytes of a GPU")
                    self._measured(spec)

    def _measure_host(self, model: ManagedModel) -> None:
        most = max((one.beside_kv for one in model.instance_rows), default=0)
        if most <= model.beside_kv or not model.is_newest:
            return
        model.beside_kv, spec = most, model.wanted.spec
        if self._memory.measure(spec, most, self._wall()):
            self._note(model, f"an instance takes {most} bytes of the host without its KV cache")
            self._measured(spec)
            for one in self._models.values():
                self.take_claim(one)


def _gpus(sample: DeviceSample) -> set[str]:
    return {one.uuid for one in sample.inventory.devices}
