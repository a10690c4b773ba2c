"""Several models on shared GPUs: a placement under a load, in virtual time.

Requests go to the instance of their model with the fewest for the rate that the placement gives
it, and stay there. Units are `kvmig_tools.sim.unit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.random import default_rng

from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import ModelLoad, Plan
from kvmig.placement.step_costs import DeviceCosts
from kvmig_tools.sim.events import EventQueue
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.unit import SimUnit, Tenant

SCALES = (5, 8, 10, 20)
"""Of SLOs: in time within so many times the latency of the same request alone."""


class Load(NamedTuple):
    """Of one model: when its requests come, and their lengths."""

    llm: ModelLoad
    arrivals: Sequence[float]
    """Seconds, ascending."""
    prompts: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    throughput: tuple[float, ...]
    """Of each model: its requests / the time from its first arrival to its last end."""
    in_time: Mapping[int, float]
    """Share of all requests, by scale."""
    requests: int

    @property
    def requests_per_s(self) -> float:
        """Of all models together."""
        return sum(self.throughput)

    def axis(self, rates: Sequence[float]) -> float:
        """MuxServe's: the mean of rate x throughput."""
        return sum(a * b for a, b in zip(rates, self.throughput, strict=True)) / len(rates)


class _Instance(NamedTuple):
    unit: SimUnit
    rate: float


def share_gpt(seed: int, count: int) -> tuple[list[int], list[int]]:
    """Lengths of prompts and answers with the means of ShareGPT as MuxServe cut it: 161 and 338,
    prompts of 4 to 1,024 tokens, 2,048 together. Log-normal: the paper doesn't say more."""
    draw = default_rng(seed)
    prompts: list[int] = []
    outputs: list[int] = []
    while len(prompts) < count:
        prompt = draw.lognormal(PROMPT_MU, PROMPT_SIGMA, 2 * count).astype(int)
        output = draw.lognormal(OUTPUT_MU, OUTPUT_SIGMA, 2 * count).astype(int)
        fit = (prompt >= 4) & (prompt <= 1024) & (output >= 4) & (prompt + output <= 2048)
        prompts += prompt[fit].tolist()
        outputs += output[fit].tolist()
    return prompts[:count], outputs[:count]


PROMPT_MU, PROMPT_SIGMA = 4.51, 1.52
OUTPUT_MU, OUTPUT_SIGMA = 5.455, 1.02


def poisson(llm: ModelLoad, count: int, seed: int) -> Load:
    """So many requests at the model's rate, with ShareGPT's lengths."""
    arrivals = np.cumsum(default_rng(seed).exponential(1 / llm.rate, count))
    prompts, outputs = share_gpt(seed + 1, count)
    return Load(llm, arrivals.tolist(), prompts, outputs)


def simulate(
    estimator: PlanEstimator,
    plan: Plan,
    loads: Sequence[Load],
    policy: str = "adbs",
    rule: str = "muxserve",
    decode_shares: Mapping[str, float] = MappingProxyType({}),
) -> Outcome:
    """Run a placement until every request has ended.

    loads: in the order of the models. decode_shares: of models, by name, that have others than the
    estimator's.
    """
    events = EventQueue()
    device = estimator.cluster.device
    instances = _instances(events, estimator, plan, policy, rule, decode_shares)
    requests: list[list[SimRequest]] = [[] for _ in loads]
    for index, load in enumerate(loads):
        stream = _requests(load)
        _next(events, stream, load.llm.name, instances[index], requests[index])
    events.run()
    return _outcome(device, loads, requests)


def _instances(
    events: EventQueue,
    estimator: PlanEstimator,
    plan: Plan,
    policy: str,
    rule: str,
    decode_shares: Mapping[str, float],
) -> list[list[_Instance]]:
    device, models = estimator.cluster.device, estimator.models
    found: list[list[_Instance]] = [[] for _ in models]
    for unit in plan:
        expected = estimator.unit(unit) or ()
        tenants = [
            Tenant(models[member.llm].name, models[member.llm].model,
                   decode_shares.get(models[member.llm].name, one.share), one.kv_bytes,
                   models[member.llm].tokens)
            for member, one in zip(unit.members, expected, strict=True)
        ]  # fmt: skip
        modelled = SimUnit(events, device, unit.gpus, tenants, policy, rule)
        for member in unit.members:
            found[member.llm].append(_Instance(modelled, member.rate))
    return found


def _requests(load: Load) -> Iterator[SimRequest]:
    rows = zip(load.arrivals, load.prompts, load.outputs, strict=True)
    for number, (arrival, prompt, output) in enumerate(rows):
        yield SimRequest(number, arrival, prompt, output)


def _next(
    events: EventQueue,
    stream: Iterator[SimRequest],
    name: str,
    instances: Sequence[_Instance],
    requests: list[SimRequest],
) -> None:
    """Let the next request come, and then the one after it."""
    request = next(stream, None)
    if request is None:
        return
    requests.append(request)

    def arrive() -> None:
        target = min(instances, key=lambda one: (1 + one.unit.tenants[name].outstanding) / one.rate)
        target.unit.submit(name, request)
        _next(events, stream, name, instances, requests)

    events.at(request.arrival, arrive)


def _outcome(
    device: DeviceCosts, loads: Sequence[Load], requests: Sequence[Sequence[SimRequest]]
) -> Outcome:
    throughput: list[float] = []
    times: list[float] = []
    for load, done in zip(loads, requests, strict=True):
        last = max(one.finished_at for one in done)
        throughput.append(len(done) / (last - done[0].arrival))
        for one in done:
            alone = device.alone_s(
                load.llm.model, one.input_tokens, one.final_tokens - one.input_tokens
            )
            times.append((one.finished_at - one.arrival) / alone)
    in_time = {scale: sum(one <= scale for one in times) / len(times) for scale in SCALES}
    return Outcome(tuple(throughput), in_time, len(times))
