"""A modelled unit: GPUs that instances of several models share, gated by the live ADBS.

A job is one step: some prompts of one model, or one decode step of all its running requests. It
takes what the cost model says for its share of the SMs, and longer by the ratio in which SMs
and memory bandwidth are booked above what there is when it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvmig.engines.gate import PARTS, ComputeShares, StepRequest
from kvmig.placement.step_costs import DeviceCosts
from kvmig.sharing.memory_quotas import PERIOD_S, RULES, MemoryUse
from kvmig.sharing.policies import DeviceState, ScheduledStep
from kvmig_tools.sim.batch import DecodeBatch
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.request import SimRequest

PREFILL_TOKENS = 2048
"""Of one job of prompts."""
MOST_SEQUENCES = 256
"""Of one model's batch."""
BLOCK_TOKENS = 16
SHARED = "shared"
"""Instead of a rule for quotas: whoever comes first takes what is free."""


class Tenant(NamedTuple):
    """An instance on a unit."""

    name: str
    model: str
    """Whose costs it has."""
    decode_share: float
    quota_bytes: float
    request_tokens: float
    """Mean, of a request at its end: so many a quota is counted to hold."""


class SimTenant:
    """What one instance of the unit has to do."""

    def __init__(self, tenant: Tenant, device: DeviceCosts, gpus: int) -> None:
        cost = device.models[tenant.model].cost_on(gpus)
        if cost is None:
            raise ValueError(f"{tenant.model} has no costs on {gpus} GPUs of {device.name}")
        self.name = tenant.name
        self.cost = cost
        self.weights = device.models[tenant.model].weight_bytes
        self.token_bytes = device.models[tenant.model].token_bytes
        self.request_bytes = tenant.request_tokens * self.token_bytes
        self.quota = tenant.quota_bytes
        self.waiting: deque[SimRequest] = deque()
        self.prompts: list[SimRequest] = []
        """In the job that runs."""
        self.batch = DecodeBatch(BLOCK_TOKENS)
        self.held_s = 0.0
        """Requests x seconds since quotas were adapted."""
        self.seen_at = 0.0

    @property
    def running(self) -> int:
        """Requests that hold KV cache."""
        return len(self.batch) + len(self.prompts)

    @property
    def outstanding(self) -> int:
        """Requests that are here."""
        return self.running + len(self.waiting)

    @property
    def room(self) -> int:
        """Requests that may still start."""
        most = min(MOST_SEQUENCES, max(1, int(self.quota / self.request_bytes)))
        return most - self.running

    def want(self) -> StepRequest:
        """For the gate."""
        first = self.waiting[0] if self.waiting and self.room > 0 else None
        oldest = next(iter(self.batch.requests.values()), None)
        return StepRequest(
            prompt_tokens=0 if first is None else first.tokens,
            decodes=len(self.batch),
            oldest_prompt=0.0 if first is None else first.arrival,
            oldest_decode=0.0 if oldest is None else oldest.arrival,
        )

    def count(self, now: float) -> None:
        """Add what it held until now to the mean; before that changes."""
        self.held_s += self.running * (now - self.seen_at)
        self.seen_at = now

    def take_prompts(self) -> tuple[int, int]:
        """Those of the next job: (their tokens, the sum of their squares)."""
        tokens = squares = 0
        room = self.room
        while self.waiting and len(self.prompts) < MOST_SEQUENCES and room > 0:
            size = self.waiting[0].tokens
            if self.prompts and tokens + size > PREFILL_TOKENS:
                break
            self.prompts.append(self.waiting.popleft())
            tokens, squares, room = tokens + size, squares + size * size, room - 1
        return tokens, squares


class Crowd:
    """The jobs that a unit runs at once: each takes longer by the ratio in which SMs and memory
    bandwidth are booked above what there is when it begins."""

    def __init__(self, bandwidth: float) -> None:
        """bandwidth: of all its memory, bytes a second."""
        self._bandwidth = bandwidth
        self._traffic: dict[str, float] = {}
        """Bytes a second that each model's job reads, of those that decode."""

    def begin(self, model: str, seconds: float, booked: int, reads: float = 0.0) -> float:
        """How long a job takes that alone takes `seconds` and reads so many bytes (0: it computes
        prompts); booked: parts of all jobs, with this one."""
        times = max(1.0, booked / PARTS)
        if reads:
            self._traffic[model] = reads / seconds
            times = max(times, sum(self._traffic.values()) / self._bandwidth)
        return seconds * times

    def end(self, model: str) -> None:
        """It has ended."""
        self._traffic.pop(model, None)


class SimUnit:
    """One unit in virtual time."""

    def __init__(
        self,
        events: EventQueue,
        device: DeviceCosts,
        gpus: int,
        tenants: Sequence[Tenant],
        policy: str = "adbs",
        rule: str = "muxserve",
    ) -> None:
        """rule: of the quotas; fixed: they aren't adapted; shared: there are none."""
        self._events = events
        self._device = device
        self._crowd = Crowd(device.bandwidth * gpus)
        self.tenants = {one.name: SimTenant(one, device, gpus) for one in tenants}
        self._shares = {one.name: ComputeShares(PARTS, parts(one.decode_share)) for one in tenants}
        self._gate = DeviceState(policy, self._shares)
        self._arena = sum(one.quota_bytes for one in tenants)
        self._rule = rule if len(tenants) > 1 else "fixed"
        self._adapting = False

    def submit(self, name: str, request: SimRequest) -> None:
        """A request for one of the models."""
        self.tenants[name].waiting.append(request)
        self._look(name)
        self._stir()
        if self._rule in RULES and self._rule != "fixed" and not self._adapting:
            self._adapting = True
            self._events.after(PERIOD_S, self._adapt)

    def _look(self, name: str) -> None:
        if self._rule == SHARED:
            self._share_all()
        self._gate.record_request(name, self.tenants[name].want())

    def _share_all(self) -> None:
        """Everybody may have what nobody holds; whoever is full may hope again."""
        held = {name: one.running * one.request_bytes for name, one in self.tenants.items()}
        free = self._arena - sum(held.values())
        for name, one in self.tenants.items():
            one.quota = held[name] + free
            if name not in self._gate.running:
                self._gate.record_request(name, one.want())

    def _stir(self) -> None:
        for job in self._gate.grants():
            seconds = self._begin(job)
            self._events.after(seconds, partial(self._end, job))

    def _begin(self, job: ScheduledStep) -> float:
        """How long the job takes, from what runs beside it."""
        one = self.tenants[job.model]
        one.count(self._events.now)
        share, booked = job.parts / PARTS, self._gate.booked
        if job.kind == "prefill":
            tokens, squares = one.take_prompts()
            return self._crowd.begin(one.name, one.cost.prefill_s(tokens, squares, share), booked)
        sequences, context = len(one.batch), one.batch.context
        seconds = one.cost.decode_s(sequences, context, share)
        # Every step reads the weights and the batch's cache.
        return self._crowd.begin(one.name, seconds, booked, one.weights + context * one.token_bytes)

    def _end(self, job: ScheduledStep) -> None:
        one, now = self.tenants[job.model], self._events.now
        one.count(now)
        self._crowd.end(one.name)
        if job.kind == "prefill":
            done = self._prompts_done(one)
        else:
            done = one.batch.advance(1)
            for request in done:
                one.batch.remove(request)
        self._gate.finish_step(job)
        self._look(job.model)
        self._stir()
        for request in done:
            request.finished_at = now

    def _prompts_done(self, one: SimTenant) -> list[SimRequest]:
        """Their first tokens are out; those that wanted just one are finished."""
        done: list[SimRequest] = []
        for request in one.prompts:
            request.generated = 1
            request.first_token_at = self._events.now
            if request.tokens >= request.final_tokens:
                done.append(request)
            else:
                one.batch.add(request)
        one.prompts = []
        return done

    def _adapt(self) -> None:
        """Quotas by the live rule, as long as anything is here."""
        now = self._events.now
        uses: list[MemoryUse] = []
        for one in self.tenants.values():
            one.count(now)
            size = one.request_bytes
            uses.append(
                MemoryUse(
                    model=one.name,
                    quota=int(one.quota),
                    floor=int(size),
                    held=int(one.running * size),
                    mean=one.held_s / PERIOD_S * size,
                    wanted=one.outstanding * size,
                )
            )
            one.held_s = 0.0
        for name, quota in RULES[self._rule](uses).items():
            self.tenants[name].quota = quota
            self._look(name)
        self._stir()
        if any(one.outstanding for one in self.tenants.values()):
            self._events.after(PERIOD_S, self._adapt)
        else:
            self._adapting = False


def parts(share: float) -> int:
    """A share of the SMs as parts that the gate books."""
    return max(1, min(PARTS, round(share * PARTS)))
