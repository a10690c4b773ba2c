"""vLLM's sleep on a CPU worker, as one on a GPU has it: a stand-in, for vLLM's own needs CUDA.

Asleep, nothing of the weights and the KV cache is where it was: both are full of NaN, so that
whatever reads them shows it. Awake, the weights are what they were, and the KV cache is zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvmig.engines.vllm.memory import BlockMemory

if TYPE_CHECKING:
    from tests.support.vllm_side import Side


class SleepingWorker:
    """Takes the place of `sleep` and `wake_up` of a worker that is this process."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._kept: list[torch.Tensor] = []
        self.levels: list[int] = []
        self.broken: Callable[[torch.Tensor], object] = lambda weight: None
        """What happens to the first weight on its way back."""

    def sleep(self, level: int = 1) -> None:
        """Take the weights, and drop the KV cache."""
        self.levels.append(level)
        self._kept = [one.data.clone() for one in self._worker.get_model().parameters()]
        for weight in self._worker.get_model().parameters():
            weight.data.fill_(float("nan"))
        self._fill(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Give both back."""
        for weight, kept in zip(self._worker.get_model().parameters(), self._kept, strict=True):
            weight.data.copy_(kept)
        self.broken(self.first_weight)
        self._fill(0.0)

    @property
    def first_weight(self) -> torch.Tensor:
        """As it is now."""
        weight: torch.Tensor = next(self._worker.get_model().parameters()).data
        return weight

    def _fill(self, value: float) -> None:
        for cache in self._worker.model_runner.kv_caches:
            cache.fill_(value)


def count_as_sleeper(patch: pytest.MonkeyPatch, side: Side) -> SleepingWorker:
    """The engine is on a GPU as far as parking goes, and was started with sleep mode."""
    worker = side.core.model_executor.driver_worker.worker
    sleeper = SleepingWorker(worker)
    patch.setattr(worker, "sleep", sleeper.sleep)
    patch.setattr(worker, "wake_up", sleeper.wake_up)
    patch.setattr(BlockMemory, "on_gpu", property(lambda memory: True))
    patch.setattr(side.core.vllm_config.model_config, "enable_sleep_mode", True)
    return sleeper


def keep_probe(patch: pytest.MonkeyPatch, side: Side) -> None:
    """What a probe has found is forgotten after the test: the engine is other tests', too."""
    patch.setattr(side.engine, "numerics", side.engine.numerics)
    patch.setattr(side.engine._own, "canary", "")


def probe_by(patch: pytest.MonkeyPatch, side: Side, digests: Iterator[str]) -> None:
    """Each probe gives the next of these."""

    async def probed() -> str:
        return next(digests)

    patch.setattr(side.engine._own, "_probed", probed)
