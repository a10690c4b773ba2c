"""transformers' own scheduler, but for requests that hold blocks without being in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState as State
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from kvmig.engines.transformers.follower import Follower

NAME = "kvmig"


class MigratingScheduler(FIFOScheduler):
    """Beside its own requests there are suspended, arriving and following ones."""

    starved_requests: list[tuple[State, int]]
    elsewhere: Callable[[], int] = staticmethod(lambda: 0)
    """How many suspended and arriving ones are not among the active requests, but may be next."""

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[Any, bool, int, int]:
        """The next step's requests; none if they have to wait for a migration's end.

        The stock engine ends when its last request can't have the blocks that it needs: it takes
        for granted that nobody else has them.
        """
        batch = super().schedule_batch(token_budget, cache_budget)
        if self._drop_starved_followers() and batch[0] is None:
            batch = super().schedule_batch(token_budget, cache_budget)
        if batch[0] is None and self.elsewhere() and len(self.active_requests) <= 1:
            self.cache.evict_cached_blocks()
            batch = super().schedule_batch(token_budget, cache_budget)
            return ([], *batch[1:]) if batch[0] is None else batch
        return batch

    def _drop_starved_followers(self) -> bool:
        """They have a source to go on at: nobody is preempted for them, or waits for them."""
        starved = self.starved_requests
        others: list[tuple[State, int]] = []
        for state, length in starved:
            if isinstance(state, Follower):
                state.lost = True
                self.finish_request(state.request_id)
            else:
                others.append((state, length))
        self.starved_requests = others
        return len(others) < len(starved)

    def _get_waiting_candidates(self) -> list[State]:
        """No more than can go on with those that are elsewhere, once they are back or here."""
        seats = self.max_requests_per_batch - len(self.active_requests) - self.elsewhere()
        waiting: list[State] = super()._get_waiting_candidates()
        return waiting[: max(0, seats)]

    def _infer_request_tokens(self, state: State, started: set[str]) -> list[int]:
        if isinstance(state, Follower):
            left: list[int] = state.remaining_prefill_tokens
            return left
        tokens: list[int] = super()._infer_request_tokens(state, started)
        return tokens

    def _schedule_request(
        self, state: State, tokens: list[int], token_budget: int, started: set[str]
    ) -> None:
        if isinstance(state, Follower):
            state.take(token_budget)
            return
        if state.status == RequestStatus.DECODING and len(tokens) > token_budget:
            # It followed until now, and more is left than this step can take: as of a prompt.
            state.remaining_prefill_tokens, state.status = tokens, RequestStatus.PREFILLING
        super()._schedule_request(state, tokens, token_budget, started)


def register() -> None:
    """Let `ContinuousBatchingConfig.scheduler_type` name it."""
    SCHEDULER_MAPPING[NAME] = MigratingScheduler
