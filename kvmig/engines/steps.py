"""When an engine's steps end, and which of them waits for a request that is about to be committed.

A request that comes just after a step began waits for nearly all of it. So its source announces
when it will come, and a step that could begin shortly before waits for it instead: at most `HOLD`
of a step and `MOST_S`, and once for each request, whether it comes or not. Times are passed in.

Where steps overlap, a step could be launched when the one before it has begun, but needn't be until
shortly before that one ends (`launch_s`): up to then it waits for a request at no cost.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from kvmig.engines.base import StepCadence

WEIGHT = 0.2
"""Weight of a new step in the average."""
IDLE_STEPS = 3.0
"""Steps' time after which an engine that has made no step counts as idle."""


HOLD = 0.3
"""Share of a step that a step waits at most."""
MOST_S = 0.015
LAUNCH_S = 0.003
"""How long before it begins a step is launched where steps overlap, or half of a step before, if
that is less. On an H100 the first step of an idle vLLM took 2.2 to 3.2 ms longer than the others,
which are launched while another one runs (Llama-3-8B's shape, 26 November 2026)."""


class CadenceMeter:
    """Measures how long one engine's steps take, given one after the other. Times in seconds."""

    def __init__(self, overlap: bool = False) -> None:
        """overlap: whether the engine launches a step while another one runs."""
        self._overlap = overlap
        # One tuple, so that other threads never read half of a step.
        self._last: tuple[float, float] | None = None
        """(end of the last step, average period in milliseconds)."""

    def step(self, began: float, ended: float) -> None:
        """A step ended."""
        ms = (ended - began) * 1e3
        if self._last is None:
            self._last = ended, ms
            return
        last_ended, period_ms = self._last
        # What the engine does between two steps counts, unless it had nothing to do.
        pause_ms = (began - last_ended) * 1e3
        ms += pause_ms if pause_ms < period_ms else 0.0
        self._last = ended, period_ms + WEIGHT * (ms - period_ms)

    def cadence(self, now: float) -> StepCadence:
        """The engine's cadence at `now`; from any thread."""
        if (last := self._last) is None:
            return StepCadence(0.0, 0.0)
        ended, period_ms = last
        since_ms = max(0.0, (now - ended) * 1e3)
        launch_ms = launch_s(period_ms / 1e3) * 1e3 if self._overlap else 0.0
        idle = since_ms > IDLE_STEPS * period_ms
        return StepCadence(since_ms, 0.0 if idle else period_ms, launch_ms)

    def free_s(self, now: float) -> float:
        """How long the next step may wait at no cost, where one runs that was launched before."""
        if not self._overlap or (last := self._last) is None:
            return 0.0
        ended, period_ms = last
        step_s = period_ms / 1e3
        return max(0.0, ended + step_s - launch_s(step_s) - now)


def limit_s(step_s: float) -> float:
    """How long a step may wait, where one takes `step_s`. Example: 3 ms, of 10 ms."""
    return min(HOLD * step_s, MOST_S)


def launch_s(step_s: float) -> float:
    """How long before it begins a step is launched, where one takes `step_s` and steps overlap."""
    return min(LAUNCH_S, step_s / 2)


class StepHold:
    """The requests that one engine expects. Times in seconds, on one clock."""

    def __init__(self) -> None:
        self._due: dict[str, float | None] = {}
        """Arrival times by request; None: a step has waited for it."""
        self._lock = threading.Lock()

    def expect(self, request_id: str, at: float) -> None:
        """The request comes at about that time. From any thread; only the first word counts."""
        with self._lock:
            self._due.setdefault(request_id, at)

    def over(self, request_id: str) -> None:
        """The request is here, or won't come. Unknown ids are ignored."""
        with self._lock:
            self._due.pop(request_id, None)

    def awaited(self, now: float, step_s: float, free_s: float = 0.0) -> Collection[str]:
        """The requests for which the step that could be made `now` waits; none is named again.

        free_s: time that it may wait at no cost, see `CadenceMeter.free_s`. One that is late by
        more than a step may wait isn't waited for, either.
        """
        if not self._due:
            return ()
        limit = limit_s(step_s)
        with self._lock:
            near = [
                request_id
                for request_id, due in self._due.items()
                if due is not None and -limit <= due - now <= free_s + limit
            ]
            self._due.update(dict.fromkeys(near))
        return near

    def coming(self, request_ids: Collection[str]) -> bool:
        """Whether any of them isn't here yet, and may still come."""
        return any(request_id in self._due for request_id in request_ids)
