"""How much memory there is on this host, and how much a model takes of it, by its files and flags.

Only the host's: what a model takes of GPUs is said by `kvmig.fleet.device_budget`.
"""

from __future__ import annotations

from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity, too_large
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_claims import KV_FLAG
from kvmig.fleet.spec import ModelSpec, number_in
from kvmig.launcher.environment import (
    CPU_KV_MOST,
    available_memory,
    fixed_memory,
    total_memory,
    weights_of,
)

TOY = 128 << 20


class MemoryBudget:
    """Of this host, for all models."""

    def __init__(self, most: int = 0, devices: DeviceBudget | None = None) -> None:
        """most: that models may take together; 0: all. devices: the host's GPUs; None: none."""
        self.devices = devices or DeviceBudget()
        self._most = most

    def host(self) -> HostCapacity:
        """The host's memory as it is now. Raises ConfigError."""
        total = total_memory()
        return HostCapacity(min(self._most, total) if self._most else total, available_memory())

    def claim(self, spec: ModelSpec) -> int:
        """Bytes of one instance: as its specification says, or estimated."""
        if spec.memory:
            return spec.memory
        if spec.engine == "toy":
            return TOY
        if self.devices.claim(spec) is not None:
            return fixed_memory(spec.workers, 0)
        return fixed_memory(spec.workers, weights_of(spec.folder)) + spec.workers * self.kv(spec)

    def kv(self, spec: ModelSpec) -> int:
        """Bytes of the KV cache of each worker in the host's memory."""
        if spec.engine == "toy" or self.devices.claim(spec) is not None:
            return 0
        usual = CPU_KV_MOST if spec.engine == "vllm" else 0
        return number_in(spec.flags, usual, KV_FLAG)

    def parked(self, spec: ModelSpec) -> int:
        """Bytes of one that is parked."""
        if spec.engine != "vllm":
            return TOY // 2
        kv = number_in(spec.flags, 0 if spec.memory else CPU_KV_MOST, KV_FLAG)
        return max(0, self.claim(spec) - spec.workers * kv)

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can never start, or be parked."""
        self.devices.check(spec)
        if spec.warm == "parked" and spec.engine != "toy" and self.devices.there:
            raise ConfigError(
                f"model {spec.name}: warm is 'parked', must be none or always on a GPU, where"
                " parking has not been measured"
            )
        claim = self.claim(spec) * max(1, spec.least)
        if wrong := too_large(spec.name, claim, self.host().total):
            raise ConfigError(wrong)
