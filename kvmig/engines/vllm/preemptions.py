"""Counts the scheduler's preemptions by priority; vLLM's own count says neither whose nor why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.engines.base import Preempted


class Preemptions:
    """Of one engine, since it was made. On the engine's thread."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Puts itself before the scheduler's one place that preempts."""
        self._scheduler = scheduler
        self._times: Counter[int] = Counter()
        self._below: Counter[int] = Counter()
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._count

    def counts(self) -> tuple[Preempted, ...]:
        """One a priority of which a request was ever preempted."""
        return tuple(
            Preempted(priority, times, self._below[priority])
            for priority, times in sorted(self._times.items())
        )

    def _count(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._times[request.priority] += 1
        if any(other.priority < request.priority for other in self._scheduler.running):
            self._below[request.priority] += 1
        self._preempt(request, *args, **kwargs)
