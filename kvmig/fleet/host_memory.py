"""How much memory there is on this host, and how much a model takes of it, by its files and flags.

Only the host's: what a model takes of GPUs is said by `kvmig.fleet.device_budget`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import replace

from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity, too_large
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_claims import KV_FLAG, size_in
from kvmig.fleet.memory_figures import ASSUMED, MeasuredRest, MemoryShape
from kvmig.fleet.model_shapes import (
    FolderFacts,
    is_eager,
    sees_media,
    shape_of,
    step_of,
    tokenizer_of,
    weight_files,
)
from kvmig.fleet.spec import ModelSpec, text_in
from kvmig.fleet.worker_nodes import LOCAL
from kvmig.launcher.environment import (
    CPU_KV_MOST,
    INSTANCE_OVERHEAD,
    available_memory,
    fixed_memory,
    processes_of,
    total_memory,
)

TOY = 128 << 20
LEAST_REST = 600 << 20
"""What a process of vLLM takes on a CPU apart from weights, KV cache and its largest step, where
nothing is compiled: measured 560 to 620 MiB with vLLM 0.32."""


class MemoryBudget:
    """The memory of this host, for all models."""

    def __init__(
        self,
        most: int = 0,
        devices: DeviceBudget | None = None,
        workers: Callable[[], HostCapacity] | None = None,
    ) -> None:
        """most: that models may take together; 0: all. devices: the host's GPUs; None: none.

        workers: the memory of all workers together, where models run there; None: they run here.
        """
        self.devices = devices or DeviceBudget()
        self.figures = self.devices.figures
        self._most = most
        self.labels = {"arch": platform.machine(), "os": sys.platform, "worker": LOCAL}
        """The labels of this host as a worker."""
        self._workers = workers

    def host(self) -> HostCapacity:
        """The host's memory as it is now. Raises ConfigError."""
        if self._workers is None:
            found = HostCapacity(total_memory(), available_memory())
        else:
            found = self._workers()
        return replace(found, total=min(self._most, found.total)) if self._most else found

    def claim(self, spec: ModelSpec) -> int:
        """Bytes of one instance: as its specification says, or estimated."""
        if spec.memory:
            return spec.memory
        if spec.engine == "toy":
            return TOY
        weights, rest = self.weights(spec), self.rest(spec)[0]
        each = self.kv(spec) + self.step(spec)
        fixed = fixed_memory(spec.workers, weights, rest) + self.tokenizer(spec)
        return fixed + spec.workers * each

    def weights(self, spec: ModelSpec) -> int:
        """Bytes of all workers' weights in the host's memory."""
        if spec.engine == "toy" or self.devices.claim(spec) is not None:
            return 0
        sizes = self.devices.sizes(spec)
        files = weight_files(spec, self._facts(spec))
        return files if sizes is None else sizes.weights * spec.workers

    def rest(self, spec: ModelSpec) -> tuple[int, str]:
        """Bytes of each process apart from weights, KV cache and its largest step, and the figure's
        origin."""
        shape = self._shape(spec)
        if not self.step(spec):
            found = self.figures.nearest(shape)
            return (INSTANCE_OVERHEAD, ASSUMED) if found is None else (found.rest, found.basis)
        # One that has computed no large step yet shows too little.
        found = self.figures.typical(shape)
        if found is None:
            known = is_eager(spec) and not sees_media(spec, self._facts(spec))
            return (LEAST_REST if known else INSTANCE_OVERHEAD), ASSUMED
        return max(found.rest, LEAST_REST), found.basis

    def step(self, spec: ModelSpec) -> int:
        """Bytes of each worker for its largest step, by its configuration; 0: that isn't known, and
        is a part of `rest`."""
        if spec.memory or self.devices.claim(spec) is not None:
            return 0
        return step_of(spec, self._facts(spec), self.devices.sizes(spec), self.kv(spec))

    def tokenizer(self, spec: ModelSpec) -> int:
        """Bytes of the tokenizer that one process of an instance holds; 0: they are a part of
        `rest`."""
        return tokenizer_of(self._facts(spec)) if self.step(spec) else 0

    def rest_of_worker(self, spec: ModelSpec) -> tuple[int, str]:
        """The same for each worker, with its part of the processes that all of them have."""
        if spec.engine == "toy":
            return TOY, ASSUMED
        if spec.memory:
            rest = spec.memory - self.weights(spec) - spec.workers * self.kv(spec)
            return max(0, rest) // spec.workers, "as memory of the specification says"
        rest, basis = self.rest(spec)
        shared = processes_of(spec.workers) * rest + self.tokenizer(spec)
        return shared // spec.workers + self.step(spec), basis

    def measure(self, spec: ModelSpec, beside_kv: int, at: float) -> bool:
        """Take what an instance took of the host's memory apart from its KV cache; whether that is
        more than was known. at: Unix time."""
        if spec.engine == "toy":
            return False
        counted = self.weights(spec) + self.tokenizer(spec) + spec.workers * self.step(spec)
        rest = max(0, beside_kv - counted) // processes_of(spec.workers)
        shape = self._shape(spec)
        return self.figures.learn(MeasuredRest(shape=shape, rest=rest, model=spec.name, at=at))

    def _shape(self, spec: ModelSpec) -> MemoryShape:
        sizes, facts = self.devices.sizes(spec), self._facts(spec)
        weights = weight_files(spec, facts) // spec.workers if sizes is None else sizes.weights
        on_gpu = self.devices.claim(spec) is not None
        device = self.devices.device if on_gpu else "cpu"
        return shape_of(spec, facts, device, "host", weights, sizes)

    def _facts(self, spec: ModelSpec) -> FolderFacts:
        return self.devices.folders.facts_of(spec)

    def kv(self, spec: ModelSpec) -> int:
        """Bytes of the KV cache of each worker in the host's memory."""
        if spec.engine == "toy" or self.devices.claim(spec) is not None:
            return 0
        if spec.unit and self._workers is not None:  # the unit claims it on its worker
            return 0
        usual = CPU_KV_MOST if spec.engine == "vllm" else 0
        return size_in(text_in(spec.flags, KV_FLAG)) or usual

    def parked(self, spec: ModelSpec) -> int:
        """Bytes of one that is parked: on a GPU its weights come to the host's memory."""
        if spec.engine != "vllm":
            return TOY // 2
        if self.devices.claim(spec) is not None:
            sizes = self.devices.sizes(spec)
            files = weight_files(spec, self._facts(spec))
            return self.claim(spec) + (files if sizes is None else sizes.weights)
        kv = size_in(text_in(spec.flags, KV_FLAG)) or (0 if spec.memory else CPU_KV_MOST)
        return max(0, self.claim(spec) - spec.workers * kv)

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can never start, or be parked."""
        if self._workers is None:  # a worker with the labels may join later
            self._check_selector(spec)
        self.devices.check(spec)
        if spec.warm == "parked":
            self._check_parks(spec)
        claim = self.claim(spec) * max(1, spec.least)
        if wrong := too_large(spec.name, claim, self.host().total):
            raise ConfigError(wrong)

    def _check_selector(self, spec: ModelSpec) -> None:
        """Raises ConfigError for labels that the only worker doesn't have."""
        for name, value in spec.worker_selector.items():
            if self.labels.get(name) != value:
                there = ", ".join(f"{name}={value}" for name, value in self.labels.items())
                raise ConfigError(
                    f"model {spec.name}: worker_selector has {name}={value}, must have labels of"
                    f" the only worker, {LOCAL}: {there}"
                )

    def _check_parks(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can never be parked."""
        where = f"model {spec.name}: warm is 'parked', must be none or always"
        if spec.engine != "vllm" or self.devices.claim(spec) is None:
            return
        if spec.workers > 1:
            raise ConfigError(
                f"{where} with {spec.workers} GPUs for an instance: only an instance with one GPU"
                " can be parked"
            )
        needed, total = self.parked(spec) * max(1, spec.least), self.host().total
        if needed > total:
            raise ConfigError(
                f"{where} here: a parked model keeps its weights in the host's memory, which makes"
                f" {needed} bytes, {needed - total} more than the {total} that all models may take"
            )
