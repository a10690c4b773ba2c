"""The times at which a llumlet reports its load, and the state that it reports. Pure."""

from __future__ import annotations

from typing import Literal

from kvmig.engines.base import EngineLoad

CHANGE_PERIOD_S = 0.01
"""Least time between two load reports, however often the load changes."""
IDLE_PERIOD_S = 0.05
"""Most of the time between two looks at an engine that has nothing to do."""
LEAST_S = 0.001
"""Least time between two looks: a timer may end a little too early."""
LINGER_S = 0.25
"""Time after a message before an engine counts as idle: a request may be on its way to it."""


class LoadReporter:
    """wanted: the state that was ordered, while nothing is wrong with it."""

    def __init__(self, heartbeat_interval_ms: float, step_timeout_s: float, now: float) -> None:
        self.wanted = "serving"
        self.seq = 0
        """Number of the last report."""
        self._report_s = heartbeat_interval_ms / 1000
        self._steps = StepWatch(step_timeout_s, now)
        self._reported_at = 0.0
        self._reported: tuple[object, ...] = ()
        self._busy_until = 0.0

    def state(self, now: float, step_s: float, failed: bool) -> str:
        """The state to report; `failed` once the present step, of `step_s` seconds, won't end.

        To be called often.
        """
        ailment = self._steps.check_step(now, step_s)
        if failed or ailment == "lost":
            return "failed"
        return ailment or self.wanted

    def is_due(self, now: float, state: str, load: EngineLoad, *news: object) -> bool:
        """Whether to report now; it is taken for done.

        Blocks grow with every few steps; only which requests are there, and `news`, goes out at
        once.
        """
        told = (state, load.running, load.waiting, *news)
        if now - self._reported_at < self._report_s and told == self._reported:
            return False
        self._reported, self._reported_at = told, now
        self.seq += 1
        return True

    def pause_s(self, now: float, busy: bool, came: bool) -> float:
        """The pause before the next look at the engine, unless something comes before that.

        busy: it has requests; came: a message came since the last look.
        """
        if busy or came:
            self._busy_until = now + LINGER_S
        longest = CHANGE_PERIOD_S if now < self._busy_until else IDLE_PERIOD_S
        return min(longest, max(self._reported_at + self._report_s - now, LEAST_S))


MOST_S = 0.5
"""Most of the time between two looks that counts: more means that this process itself stood
still (stopped, or on a machine that did), and the engine's thread with it."""


class StepWatch:
    """Watches an engine's present step: hung after `step_timeout_s`, lost after twice that."""

    def __init__(self, step_timeout_s: float, now: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._looked = now
        self._step_s = 0.0
        self._running_s = 0.0

    def check_step(self, now: float, step_s: float) -> Literal["", "hung", "lost"]:
        """The engine's state; call it often. step_s: time since the step began; 0 between two."""
        passed = min(now - self._looked, MOST_S)
        # Shorter than at the last look: another step.
        self._running_s = 0.0 if step_s <= self._step_s else self._running_s + passed
        self._looked, self._step_s = now, step_s
        if self._running_s > 2 * self._step_timeout_s:
            return "lost"
        return "hung" if self._running_s > self._step_timeout_s else ""
