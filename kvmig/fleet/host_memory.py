"""How much memory there is on this host, and how much a model takes of it, by its files and flags.

Only the host's: what a model takes of a GPU's is the engine's business.
"""

from __future__ import annotations

from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity, too_large
from kvmig.fleet.spec import ModelSpec
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

    def __init__(self, most: int = 0, *, on_gpu: bool = False) -> None:
        """most: that models may take together; 0: all. on_gpu: whether engines run there."""
        self._most = most
        self._on_gpu = on_gpu

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
        workers = _number(spec, "--tensor-parallel-size", 1)
        if self._on_gpu:
            return fixed_memory(workers, 0)
        kv = _number(spec, "--kv-cache-memory-bytes", CPU_KV_MOST if spec.engine == "vllm" else 0)
        return fixed_memory(workers, weights_of(spec.folder)) + workers * kv

    def parked(self, spec: ModelSpec) -> int:
        """Bytes of one that is parked."""
        kv = _number(spec, "--kv-cache-memory-bytes", 0 if spec.memory else CPU_KV_MOST)
        workers = _number(spec, "--tensor-parallel-size", 1)
        return max(0, self.claim(spec) - workers * kv) if spec.engine == "vllm" else TOY // 2

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can never start, or be parked."""
        if spec.warm == "parked" and self._on_gpu:
            raise ConfigError(
                f"model {spec.name}: warm is 'parked', must be none or always on a GPU, where"
                " parking has not been measured"
            )
        claim = self.claim(spec) * max(1, spec.least)
        if wrong := too_large(spec.name, claim, self.host().total):
            raise ConfigError(wrong)


def _number(spec: ModelSpec, flag: str, usual: int) -> int:
    """The number that a flag gives. usual: if it isn't given, or isn't a number."""
    found = usual
    for at, word in enumerate(spec.flags):
        name, equals, value = word.partition("=")
        if name == flag:
            value = value if equals else "".join(spec.flags[at + 1 : at + 2])
            found = int(value) if value.isdecimal() else usual
    return found
