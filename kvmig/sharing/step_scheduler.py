"""A unit's engines and their jobs, as its agent sees them: which asked, and what each was answered.
Pure.

`DeviceState` decides which jobs begin; here are grants, requests by number, and an end for jobs of
engines that never say theirs. Times are seconds of one clock, passed in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from kvmig.engines.gate import NOTHING, PARTS, ComputeShares, StepGrant, StepKind, StepRequest
from kvmig.sharing.policies import DeviceState, ScheduledStep

JOB_S = 5.0
"""A job that hasn't ended after this time is taken as ended: its engine hangs, or is stopped."""


class _Running(NamedTuple):
    job: ScheduledStep
    number: int
    began: float
    stands: bool
    ends_by: float
    """Time from which it is overdue; infinity as long as it stands."""


class StepScheduler:
    """The order in which a unit's engines compute."""

    def __init__(self, policy: str = "adbs", job_s: float = JOB_S) -> None:
        """Raises ConfigError for an unknown policy."""
        self._gate = DeviceState(policy, {})
        self._job_s = job_s
        self._asked: dict[str, int] = {}
        """The number of each member's question that has no answer yet."""
        self._running: dict[str, _Running] = {}
        self.job_seconds: defaultdict[tuple[str, StepKind], float] = defaultdict(float)
        """Seconds of each member's jobs, by kind."""
        self.overdue = 0
        """Jobs whose end was not reported."""

    @property
    def members(self) -> list[str]:
        """The members, in order of their names."""
        return sorted(self._gate.models)

    @property
    def booked(self) -> int:
        """Parts of all jobs that run."""
        return self._gate.booked

    def join(self, member: str, shares: ComputeShares) -> None:
        """An engine comes, or comes again. Raises ConfigError for shares that can't be."""
        self._gate.join(member, shares)
        self.remove_member(member, stays=True)

    def remove_member(self, member: str, *, stays: bool = False) -> None:
        """Free what a member held that is gone. Unknown ones are ignored."""
        self._asked.pop(member, None)
        self._running.pop(member, None)
        self._gate.remove_model(member)
        if not stays:
            self._gate.remove(member)

    def request_step(self, member: str, request: StepRequest) -> None:
        """Take a member's request, which replaces its last one."""
        if member not in self._gate.models:
            return
        self._asked[member] = request.number
        self._gate.record_request(member, request)

    def finish_step(self, member: str, number: int, now: float) -> None:
        """The job that answered this question has ended; one that was overdue is no more here."""
        running = self._running.get(member)
        if running is not None and running.number == number:
            self._end(member, running, now)

    def grants(self, now: float) -> dict[str, StepGrant]:
        """Grants of jobs that begin now, by member, after those that are overdue have been ended.

        Where no member is left waiting a decode step's grant stands: its member goes on without
        asking, until `recalls`.
        """
        for member, running in list(self._running.items()):
            if now >= running.ends_by:
                self.overdue += 1
                self._end(member, running, now)
        granted: dict[str, StepGrant] = {}
        for job in self._gate.grants():
            number = self._asked.pop(job.model)
            stands = job.kind == "decode" and not self._somebody_waits
            ends_by = math.inf if stands else now + self._job_s
            self._running[job.model] = _Running(job, number, now, stands, ends_by)
            parts = 0 if job.parts >= PARTS else job.parts
            prompts = job.kind == "prefill"
            granted[job.model] = StepGrant(
                number=number, prompts=prompts, decodes=True, parts=parts, stands=stands
            )
        return granted

    def recalls(self, now: float) -> dict[str, int]:
        """Numbers of grants that stand no more, by member, because another one waits: such a grant
        is good for no step that hasn't begun. To be asked for after `grants`."""
        if not self._somebody_waits:
            return {}
        found: dict[str, int] = {}
        for member, running in self._running.items():
            if running.stands:
                ends_by = now + self._job_s
                self._running[member] = running._replace(stands=False, ends_by=ends_by)
                found[member] = running.number
        return found

    @property
    def _somebody_waits(self) -> bool:
        return bool(self._gate.wanting("prefill") or self._gate.wanting("decode"))

    def next_overdue(self) -> float | None:
        """When `grants` should be called again though nothing has come; None: not before."""
        due = min((running.ends_by for running in self._running.values()), default=math.inf)
        return due if due < math.inf else None

    def _end(self, member: str, running: _Running, now: float) -> None:
        wish = self._gate.wants.get(member, NOTHING) if member in self._asked else None
        del self._running[member]
        self._gate.finish_step(running.job)
        if wish is not None:  # it asked again before it said so
            self._gate.record_request(member, wish)
        self.job_seconds[member, running.job.kind] += now - running.began
