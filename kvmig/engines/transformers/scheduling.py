"""transformers' own scheduler, but for requests that hold blocks without being in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

NAME = "kvmig"


class MigratingScheduler(FIFOScheduler):
    """Beside its own requests there are suspended and arriving ones."""

    elsewhere: Callable[[], int] = staticmethod(lambda: 0)
    """How many suspended and arriving ones are not among the active requests, but may be next."""

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[Any, bool, int, int]:
        """The next step's requests; none if they have to wait for a migration's end.

        The stock engine ends when its last request can't have the blocks that it needs: it takes
        for granted that nobody else has them.
        """
        batch = super().schedule_batch(token_budget, cache_budget)
        if batch[0] is None and self.elsewhere() and len(self.active_requests) <= 1:
            self.cache.evict_cached_blocks()
            batch = super().schedule_batch(token_budget, cache_budget)
            return ([], *batch[1:]) if batch[0] is None else batch
        return batch

    def _get_waiting_candidates(self) -> list[State]:
        """No more than can go on with those that are elsewhere, once they are back or here."""
        seats = self.max_requests_per_batch - len(self.active_requests) - self.elsewhere()
        waiting: list[State] = super()._get_waiting_candidates()
        return waiting[: max(0, seats)]


def register() -> None:
    """Let `ContinuousBatchingConfig.scheduler_type` name it."""
    SCHEDULER_MAPPING[NAME] = MigratingScheduler
