"""Which model of a unit computes what next: MuxServe's ADBS (its Algorithm 3) and others. Pure.

A unit's SMs are ten parts, of which some may be booked twice. Engines report what they want;
`grants` names the jobs that begin; `finish_step` ends one. A model has one job at a time: one
engine a model.

    gate = Gate("adbs", {"a": ComputeShares(10, 4), "b": ComputeShares(10, 3)})
    gate.want("a", StepRequest(prompt_tokens=800, decodes=0))
    (job,) = gate.grants()          # a's prompts, on all parts
    gate.done(job)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.engines.gate import NOTHING, PARTS, ComputeShares, StepKind, StepRequest

OVERBOOKED = 2
"""Parts that may be booked twice, as in MuxServe."""
PASSES = 8
"""How often others may begin before a decode step that doesn't fit next to them."""


class ScheduledStep(NamedTuple):
    """One step of one model's engine."""

    model: str
    kind: StepKind
    parts: int


class DeviceState:
    """One unit's jobs: what is wanted, what runs, whose turn it is."""

    def __init__(self, policy: str, shares: Mapping[str, ComputeShares]) -> None:
        """Raises ConfigError for an unknown policy, or shares that can't be."""
        if policy not in POLICIES:
            raise ConfigError(f"policy is {policy!r:.100}, must be {' or '.join(POLICIES)}")
        self._policy = POLICIES[policy]
        self.shares: dict[str, ComputeShares] = {}
        self.models: list[str] = []
        self.wants: dict[str, StepRequest] = {}
        self.running: dict[str, ScheduledStep] = {}
        self.passed: Counter[str] = Counter()
        """How often others began while this one didn't fit."""
        self.turn: dict[StepKind, int] = {"prefill": 0, "decode": 0}
        """Index of the model that is looked at first."""
        for model in sorted(shares):
            self.join(model, shares[model])

    def join(self, model: str, shares: ComputeShares) -> None:
        """A model comes, or has other shares. Raises ConfigError for shares that can't be."""
        parts = (shares.prefill, shares.decode)
        if not all(1 <= one <= PARTS for one in parts):
            raise ConfigError(f"model {model}: shares are {parts}, must be 1 to {PARTS}")
        self.shares[model] = shares
        self._arrange()

    def remove(self, model: str) -> None:
        """Remove a model whose engine is gone. Unknown ones are ignored."""
        self.remove_model(model)
        self.shares.pop(model, None)
        self.passed.pop(model, None)
        self._arrange()

    def _arrange(self) -> None:
        """Leave the turn to the models that have it, as far as they are here."""
        before, self.models = self.models, sorted(self.shares)
        for kind, turn in self.turn.items():
            due = before[turn] if before else ""
            after = [at for at, model in enumerate(self.models) if model >= due]
            self.turn[kind] = after[0] if after else 0

    def record_request(self, model: str, want: StepRequest) -> None:
        """What it could do now, instead of what it said last."""
        self.wants[model] = want

    def finish_step(self, job: ScheduledStep) -> None:
        """Take a job's end; its model then reports again what it wants."""
        if self.running.get(job.model) == job:
            del self.running[job.model]
            self.wants[job.model] = NOTHING

    def remove_model(self, model: str) -> None:
        """Free what a model held whose engine is gone."""
        self.running.pop(model, None)
        self.wants.pop(model, None)

    def grants(self) -> list[ScheduledStep]:
        """Jobs that begin now."""
        begun: list[ScheduledStep] = []
        for job in self._policy(self):
            self.running[job.model] = job
            begun.append(job)
        return begun

    # -- what policies ask

    @property
    def booked(self) -> int:
        """Parts of all jobs that run."""
        return sum(one.parts for one in self.running.values())

    def can_book(self, parts: int) -> bool:
        """Whether that many more may be booked."""
        return self.booked + parts <= PARTS + OVERBOOKED or not self.running

    def since(self, model: str, kind: StepKind) -> float | None:
        """Time since which it wants such a job; None: it doesn't, or has a job."""
        if model in self.running:
            return None
        return self.wants.get(model, NOTHING).oldest(kind)

    def wanting(self, kind: StepKind) -> list[str]:
        """Models that want such a job, from the one whose turn it is."""
        turn = self.turn[kind]
        ring = self.models[turn:] + self.models[:turn]
        return [one for one in ring if self.since(one, kind) is not None]

    def job(self, model: str, kind: StepKind, parts: int | None = None) -> ScheduledStep:
        """Start its next job; then it is the next model's turn."""
        self.passed[model] = 0
        self.turn[kind] = (self.models.index(model) + 1) % len(self.models)
        shares = self.shares[model]
        own = shares.prefill if kind == "prefill" else shares.decode
        return ScheduledStep(model, kind, own if parts is None else parts)


def adbs(gate: DeviceState) -> Iterator[ScheduledStep]:
    """Algorithm 3: one model's prompts at a time, in turn, before all decoding; models decode
    at the same time, in turn, as long as their parts fit. Prompts that don't fit hold new decode
    steps back, or there would never be room for them; so do decode steps that others have passed
    often enough, which Algorithm 3 leaves out."""
    if not any(one.kind == "prefill" for one in gate.running.values()):
        for model in gate.wanting("prefill")[:1]:
            if not gate.can_book(gate.shares[model].prefill):
                return
            yield gate.job(model, "prefill")
    passed = list[str]()
    for model in gate.wanting("decode"):
        if gate.can_book(gate.shares[model].decode):
            for one in passed:
                gate.passed[one] += 1
            yield gate.job(model, "decode")
        elif gate.passed[model] >= PASSES:
            return
        else:
            passed.append(model)


def fcfs(gate: DeviceState) -> Iterator[ScheduledStep]:
    """MuxServe's temporal baseline: one job at a time, on all parts: the prompts of who waits
    longest, else the decode step of the model with the oldest request."""
    if gate.running:
        return
    for kind in _KINDS:
        oldest = sorted((gate.since(one, kind) or 0.0, one) for one in gate.wanting(kind))
        if oldest:
            yield gate.job(oldest[0][1], kind, PARTS)
            return


def round_robin(gate: DeviceState) -> Iterator[ScheduledStep]:
    """One job at a time, on all parts: models in turn, each with its prompts if any wait, else a
    decode step. MuxServe's, as far as its figures show it: its FCFS and its round robin are
    close."""
    if gate.running:
        return
    for model in _ring(gate):
        if (kind := _wanted(gate, model)) is not None:
            job = gate.job(model, kind, PARTS)
            gate.turn["decode"] = (gate.models.index(model) + 1) % len(gate.models)
            yield job
            return


def round_robin_shares(gate: DeviceState) -> Iterator[ScheduledStep]:
    """Round robin, but models compute at the same time, each on its parts; a model that doesn't fit
    is waited for."""
    for model in _ring(gate):
        if (kind := _wanted(gate, model)) is not None:
            job = gate.job(model, kind)
            if not gate.can_book(job.parts):
                gate.turn["decode"] = gate.models.index(model)
                return
            gate.turn["decode"] = (gate.models.index(model) + 1) % len(gate.models)
            yield job


def free(gate: DeviceState) -> Iterator[ScheduledStep]:
    """No gate: a model that wants something does it at once, with all parts, prompts first."""
    for model in gate.models:
        if (kind := _wanted(gate, model)) is not None:
            yield gate.job(model, kind, PARTS)


_KINDS: tuple[StepKind, ...] = ("prefill", "decode")


def _ring(gate: DeviceState) -> list[str]:
    """The models, from the one whose turn it is."""
    turn = gate.turn["decode"]
    return gate.models[turn:] + gate.models[:turn]


def _wanted(gate: DeviceState, model: str) -> StepKind | None:
    """The step that it wants: prompts, if any wait, else decodes; None: neither."""
    return next((kind for kind in _KINDS if gate.since(model, kind) is not None), None)


POLICIES: dict[str, Callable[[DeviceState], Iterator[ScheduledStep]]] = {
    "adbs": adbs,
    "fcfs": fcfs,
    "round-robin": round_robin,
    "round-robin-shares": round_robin_shares,
    "free": free,
}
