"""Workloads by name, as in the paper's evaluation: lengths, arrivals, priorities, from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import RandomState

from kvmig.core.errors import ConfigError
from kvmig_tools.sim import lengths
from kvmig_tools.sim.lengths import Lengths
from kvmig_tools.sim.request import SimRequest

PAPER_SEED = 0xCADE
"""The paper's own: with 10,000 requests it gives its Table 1."""


@dataclass(frozen=True)
class Workload:
    """Input and output lengths, independent of each other, and the paper's arrival rates."""

    name: str
    inputs: Lengths
    outputs: Lengths
    rates: tuple[float, ...]
    """Requests a second on 16 instances."""


WORKLOADS = {
    one.name: one
    for one in (
        Workload(
            "ShareGPT", lengths.SHAREGPT_IN, lengths.SHAREGPT_OUT, (7.0, 7.25, 7.5, 7.75, 8.0)
        ),
        Workload(
            "BurstGPT", lengths.BURSTGPT_IN, lengths.BURSTGPT_OUT, (7.5, 7.75, 8.0, 8.25, 8.5)
        ),
        Workload("S-S", lengths.S, lengths.S, (32.0, 33.0, 34.0, 35.0, 36.0)),
        Workload("M-M", lengths.M, lengths.M, (7.4, 7.5, 7.6, 7.7, 7.8)),
        Workload("L-L", lengths.L, lengths.L, (2.6, 2.7, 2.8, 2.9, 3.0)),
        Workload("S-L", lengths.S, lengths.L, (4.1, 4.15, 4.2, 4.25, 4.3)),
        Workload("L-S", lengths.L, lengths.S, (10.0, 12.0, 14.0, 16.0, 18.0)),
    )
}


def gaps(random: RandomState, count: int, rate: float, cv: float) -> np.ndarray:
    """[count] seconds between arrivals: Poisson for cv 1, else Gamma of shape 1 / cv^2."""
    if cv == 1:
        return random.exponential(1 / rate, count)
    return random.gamma(1 / cv**2, cv**2 / rate, count)


def generate(
    name: str,
    rate: float,
    *,
    count: int = 10_000,
    cv: float = 1.0,
    seed: int = PAPER_SEED,
    high_share: float = 0.0,
    high_priority: int = -1,
) -> Iterator[SimRequest]:
    """`count` requests, the first at 0. Inputs, outputs, gaps and priorities from one stream.

    high_share: of the requests, at random, get `high_priority`.
    Raises ConfigError for an unknown name or values that can't be.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"--trace is {name}, must be a CSV file or {' or '.join(WORKLOADS)}")
    for field, value, holds, allowed in (
        ("--rate", rate, 0 < rate < float("inf"), "more than 0 and finite"),
        ("--cv", cv, 0 < cv < float("inf"), "more than 0 and finite"),
        ("--requests", count, count >= 1, "1 or more"),
        ("--high-share", high_share, 0 <= high_share <= 1, "from 0 to 1"),
        ("--seed", seed, 0 <= seed < 2**32, "from 0 to 2^32 - 1"),
    ):
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")
    random = RandomState(seed)
    workload = WORKLOADS[name]
    inputs = workload.inputs.draw(random, count)
    outputs = workload.outputs.draw(random, count)
    arrivals = np.concatenate([[0.0], np.cumsum(gaps(random, count, rate, cv))[:-1]])
    high = random.random_sample(count) < high_share
    rows = zip(arrivals, inputs, outputs, high, strict=True)
    return (
        SimRequest(index, float(at), int(first), int(then), high_priority if urgent else 0)
        for index, (at, first, then, urgent) in enumerate(rows)
    )
