"""What a unit will serve: MuxServe's equation 3, by Little's law. Pure.

Prompts of one member at a time have the unit for themselves; between them the members decode
side by side, each on its share. Of a batch of b requests of l tokens,

    throughput = min(b / (time of the prompts meanwhile + l x decode step), rate)

Equation 3 counts one batch of every member as the prompts meanwhile, as if all requests took
equally long. Here each member's prompts are counted at its throughput, each a job of its own that
waits for the decode steps under way. Then all hangs on one figure, the share of time that
prompts leave: Newton's method finds it exactly, after one step a member at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmig.placement.problem import (
    GpuCluster,
    GpuUnit,
    ModelLoad,
    Objective,
    PlacedInstance,
    Plan,
    floor_bytes,
)

MOST_SEQUENCES = 256
"""Most requests of one batch; the costs were fitted up to here."""
OVERBOOKED = 1.2
"""How much of a unit's SMs its members' decode shares may be together."""
MOST_MEMBERS = 12
"""Most members of a unit: each has a tenth of the SMs. Beyond `OVERBOOKED` shares shrink alike."""
DECODE_SHARES = tuple(tenth / 10 for tenth in range(3, 10))
SLO_SCALE = 8.0
"""Factor of the latency alone within which a request is in time."""
NEARNESS = 0.1
"""Worth of being as quick as alone, besides being in time, for the objective slo."""
RESERVE = 0.5
"""Worth of a request that comes beyond the rates, up to `MARGIN`, for the objective slo."""
MARGIN = 1.25
"""Factor by which every rate is taken higher for the objective slo."""


class ExpectedLoad(NamedTuple):
    """The estimate of one member."""

    share: float
    """Share of the unit's SMs for decode steps; prefill jobs take all."""
    batch: float
    """Requests that run at once."""
    throughput: float
    """Requests per second."""
    latency_s: float
    """End to end, without queueing."""
    kv_bytes: float
    """Quota of the unit's KV cache."""


class FixedSize(NamedTuple):
    """Bytes of a model's instances where all of them have one size."""

    held: int
    """Bytes of everything but KV cache."""
    kv: int


class _Line(NamedTuple):
    """Seconds of a member's jobs: a prompt's, a decode step's d0 + d1 b, l times."""

    prompt: float
    d0: float
    d1: float


class PlanEstimator:
    """Remembers what it computed: the search asks for the same units again and again."""

    def __init__(
        self,
        models: Sequence[ModelLoad],
        cluster: GpuCluster,
        objective: Objective = "paper",
        fixed: Sequence[FixedSize] = (),
    ) -> None:
        """fixed: of each model, where units don't share KV cache; none: quotas by demand."""
        self.models = models
        self.cluster = cluster
        self.objective: Objective = objective
        self._device = cluster.device
        self._fixed = fixed
        self._units: dict[GpuUnit, tuple[ExpectedLoad, ...] | None] = {}
        self._values: dict[GpuUnit, float | None] = {}
        self._shares: dict[tuple[PlacedInstance, int], float | None] = {}
        self._lines: dict[tuple[int, int, float], _Line] = {}
        self._alone = [
            self._device.alone_s(one.model, one.prompt_tokens, one.output_tokens) for one in models
        ]

    # -- what plans are worth

    def total(self, plan: Plan) -> float:
        """Sum of the units' values; they must be feasible."""
        return sum(self.value(one) or 0.0 for one in plan)

    def value(self, unit: GpuUnit) -> float | None:
        """The objective of one unit; None: it can't be."""
        if unit not in self._values:
            self._values[unit] = self._value(unit)
        return self._values[unit]

    def _value(self, unit: GpuUnit) -> float | None:
        expected = self.unit(unit)
        if expected is None:
            return None
        if self.objective == "slo":
            return self._in_time(unit, expected)
        pairs = zip(unit.members, expected, strict=True)
        if self.objective == "requests":
            return sum(one.throughput for _, one in pairs)
        return sum(self.models[member.llm].rate * one.throughput for member, one in pairs)

    def _in_time(self, unit: GpuUnit, expected: Sequence[ExpectedLoad]) -> float:
        shares = [one.share for one in expected]
        higher = [PlacedInstance(one.llm, MARGIN * one.rate) for one in unit.members]
        then = self._solve(unit.gpus, higher, shares)
        total = 0.0
        for member, now, later in zip(unit.members, expected, then, strict=True):
            alone = self._alone[member.llm]
            total += _served(now, member.rate, alone)
            total += NEARNESS * now.throughput * alone / now.latency_s
            total += RESERVE * _served(later, MARGIN * member.rate, alone)
        return total

    # -- what a unit does

    def unit(self, unit: GpuUnit) -> tuple[ExpectedLoad, ...] | None:
        """What its members may expect; None: memory or SMs don't suffice."""
        if unit not in self._units:
            self._units[unit] = self._unit(unit)
        return self._units[unit]

    def _unit(self, unit: GpuUnit) -> tuple[ExpectedLoad, ...] | None:
        if not unit.members:
            return ()
        if self.left_bytes(unit) < 0:
            return None
        if len(unit.members) == 1:
            (member,) = unit.members
            if self._device.models[self.models[member.llm].model].cost_on(unit.gpus) is None:
                return None
            return tuple(self._solve(unit.gpus, unit.members, [1.0]))
        shares = [self.share(one, unit.gpus) for one in unit.members]
        known = [one for one in shares if one is not None]
        if len(known) < len(shares) or len(known) > MOST_MEMBERS:
            return None
        fitting = min(1.0, OVERBOOKED / sum(known))
        return tuple(self._solve(unit.gpus, unit.members, [fitting * one for one in known]))

    def left_bytes(self, unit: GpuUnit) -> float:
        """What members leave that hold one request each, or all they are to have; below 0: they
        don't fit."""
        if self._fixed:
            taken = sum(sum(self._fixed[one.llm]) for one in unit.members)
            return self._device.memory(unit.gpus) - taken
        floors = [floor_bytes(self.models[one.llm], self._device) for one in unit.members]
        return self._device.memory(unit.gpus) - sum(floors)

    def share(self, member: PlacedInstance, gpus: int) -> float | None:
        """The least share of the SMs on which a member's decode steps carry its rate; if none
        does, that with the highest throughput (MuxServe's Algorithm 2). None: it can't run."""
        key = (member, gpus)
        if key not in self._shares:
            self._shares[key] = self._least_share(member, gpus)
        return self._shares[key]

    def _least_share(self, member: PlacedInstance, gpus: int) -> float | None:
        if self._device.models[self.models[member.llm].model].cost_on(gpus) is None:
            return None
        if self.left_bytes(GpuUnit(gpus, (member,))) < 0:
            return None
        best, most = DECODE_SHARES[-1], 0.0
        for share in DECODE_SHARES:
            (one,) = self._solve(gpus, [member], [share])
            if one.throughput >= member.rate * (1 - 1e-9):
                return share
            if one.throughput > most:
                best, most = share, one.throughput
        return best

    def _solve(
        self, gpus: int, members: Sequence[PlacedInstance], shares: Sequence[float]
    ) -> list[ExpectedLoad]:
        """The smallest batches that carry the rates, as far as memory allows."""
        lines = [
            self._line(one.llm, gpus, share) for one, share in zip(members, shares, strict=True)
        ]
        quotas = self._quotas(gpus, members)
        most = [
            max(1.0, min(MOST_SEQUENCES, quota / self._request_bytes(self.models[one.llm])))
            for one, quota in zip(members, quotas, strict=True)
        ]
        drain = self._drain(gpus, members, shares)
        jobs = [
            (line.prompt + drain, one.rate, b / (line.d0 + line.d1 * b))
            for line, one, b in zip(lines, members, most, strict=True)
        ]
        left = _left_for_decoding(jobs)
        found: list[ExpectedLoad] = []
        for line, (_, rate, full), b, share, quota in zip(
            lines, jobs, most, shares, quotas, strict=True
        ):
            throughput = min(rate, full * left)
            spare = left - throughput * line.d1
            batch = min(b, throughput * line.d0 / spare) if spare > 0 else b
            found.append(ExpectedLoad(share, batch, throughput, batch / throughput, quota))
        return found

    def _drain(
        self, gpus: int, members: Sequence[PlacedInstance], shares: Sequence[float]
    ) -> float:
        """Seconds that a prompt waits for others' decode steps: half the longest, when empty."""
        if len(members) < 2:
            return 0.0
        steps = [
            self._line(one.llm, gpus, share).d0 / self.models[one.llm].output_tokens
            for one, share in zip(members, shares, strict=True)
        ]
        return max(steps) / 2

    def _quotas(self, gpus: int, members: Sequence[PlacedInstance]) -> list[float]:
        """KV cache in the ratio of the members' demand: rate x bytes of a request."""
        if self._fixed:
            return [float(self._fixed[one.llm].kv) for one in members]
        free = self._device.memory(gpus) - sum(
            self._device.fixed_bytes(self.models[one.llm].model) for one in members
        )
        demand = [one.rate * self._request_bytes(self.models[one.llm]) for one in members]
        return [free * one / sum(demand) for one in demand]

    def _request_bytes(self, llm: ModelLoad) -> float:
        return llm.tokens * self._device.models[llm.model].token_bytes

    def _line(self, index: int, gpus: int, share: float) -> _Line:
        key = (index, gpus, share)
        if key not in self._lines:
            llm = self.models[index]
            cost = self._device.models[llm.model].cost_on(gpus)
            assert cost is not None, "asked for by `share` before"
            prompt, output = llm.prompt_tokens, llm.output_tokens
            constant, sequence, token = cost.decode_line(share)
            self._lines[key] = _Line(
                cost.prefill_s(prompt, prompt**2, 1.0),
                constant * output,
                (sequence + token * llm.context) * output,
            )
        return self._lines[key]


def _left_for_decoding(jobs: Sequence[tuple[float, float, float]]) -> float:
    """The share v of time that prompts leave, from each member's (seconds a prompt, rate,
    throughput if it only decoded): the root of v + sum of prompt x min(rate, throughput x v) = 1.
    The sum grows with v and is concave, so Newton's steps from 0 never pass the root."""
    left = 0.0
    for _ in range(len(jobs) + 1):
        value, slope = left - 1, 1.0
        for prompt, rate, full in jobs:
            value += prompt * min(rate, full * left)
            slope += prompt * full if full * left < rate else 0.0
        if value >= -1e-12:
            break
        left -= value / slope
    return left


def _served(one: ExpectedLoad, rate: float, alone_s: float) -> float:
    """Requests per second in time: none of those whose queue only grows, as far as it does."""
    late = one.latency_s / (SLO_SCALE * alone_s)
    return one.throughput * one.throughput / rate / max(1.0, late)
