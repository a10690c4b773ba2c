"""The systems that are compared, and the loads of Figure 5."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvmig.core.errors import ConfigError
from kvmig.placement.dedicated import replicas, spatial
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.greedy import UnplacedMember, best_of_groups
from kvmig.placement.problem import (
    GpuCluster,
    GpuUnit,
    ModelLoad,
    Objective,
    PlacedInstance,
    Plan,
    ordered,
)
from kvmig.placement.search import search
from kvmig_tools.sim.mux import Load, poisson

HERE = Path(__file__).parent
MODELS = ["llama-7b"] * 12 + ["llama-13b"] * 4 + ["llama-30b"] * 2 + ["llama-65b"]
"""Of Figure 5, the most asked for first."""
ALPHAS = (0.7, 1.3, 2.1)
RATES = (20, 30, 40, 50)
"""Of the model that is asked for most; requests a second."""
SEND_S = 120.0
"""How long every model sends where the published counts aren't taken."""
SEED = 100


class Published(NamedTuple):
    """One system at one load of Figure 5, from the authors' results."""

    axis: float
    requests_per_s: float
    in_time: dict[int, float]


class System(NamedTuple):
    """How models are placed, and who computes next on a unit."""

    place: Callable[[PlanEstimator], Plan | UnplacedMember]
    objective: Objective
    policy: str = "adbs"


def power_law(alpha: float, highest: float, kinds: Sequence[str] = MODELS) -> list[ModelLoad]:
    """Rates as in section 4.2: the i-th model has (i + 1)^-alpha of the first one's."""
    return [
        ModelLoad(f"llm-{at}", kind, highest * (at + 1) ** -alpha) for at, kind in enumerate(kinds)
    ]


def muxserve(estimator: PlanEstimator) -> Plan | UnplacedMember:
    """Algorithm 1: every model in one place."""
    whole = [PlacedInstance(at, one.rate) for at, one in enumerate(estimator.models)]
    return best_of_groups(estimator, whole)


def paper_spatial(estimator: PlanEstimator) -> Plan:
    """The paper's baseline: a 7B or 13B has one GPU, a 30B four, the 65B eight."""
    gpus = {"llama-30b": 4, "llama-65b": 8}
    return ordered(
        [
            GpuUnit(gpus.get(one.model, 1), (PlacedInstance(at, one.rate),))
            for at, one in enumerate(estimator.models)
        ]
    )


SYSTEMS: dict[str, System] = {
    "muxserve": System(muxserve, "paper"),
    "temporal": System(muxserve, "paper", "fcfs"),
    "spatial": System(paper_spatial, "paper"),
    "spatial-best": System(spatial, "paper"),
    "replicas": System(replicas, "slo"),
    "kvmig": System(search, "slo"),
}
PAPERS = ("muxserve", "temporal", "spatial")


def planned(
    system: str, models: Sequence[ModelLoad], cluster: GpuCluster
) -> tuple[PlanEstimator, Plan]:
    """A system's placement. Raises ConfigError if it finds none."""
    one = SYSTEMS[system]
    estimator = PlanEstimator(models, cluster, one.objective)
    plan = one.place(estimator)
    if isinstance(plan, UnplacedMember):
        raise ConfigError(f"{system} finds no room for {models[plan.llm].name}")
    return estimator, plan


def published() -> dict[tuple[float, int, str], Published]:
    """Figure 5 by (alpha, rate, system)."""
    return {
        (float(row["alpha"]), int(row["max_rate"]), row["system"]): Published(
            float(row["axis_value"]),
            float(row["requests_per_s"]),
            {scale: float(row[f"slo{scale}"]) for scale in (5, 8, 10, 20)},
        )
        for row in csv_rows("fig5_published.csv")
    }


def loads(
    alpha: float, rate: int, as_published: bool, share: float = 1.0, send_s: float = SEND_S
) -> list[Load]:
    """Every model's requests; share: of the requests, for runs that are to be quick."""
    models = power_law(alpha, rate)
    counts = {
        row["llm"]: int(row["requests"])
        for row in csv_rows("fig5_requests.csv")
        if float(row["alpha"]) == alpha and int(row["max_rate"]) == rate
    }
    return [
        poisson(
            one,
            max(2, int(share * (counts[one.name] if as_published else one.rate * send_s))),
            SEED + 2 * at,
        )
        for at, one in enumerate(models)
    ]


def stretched(drawn: Load) -> Load:
    """The same with ShareGPT's lengths stretched to the model's means."""
    llm = drawn.llm
    prompts = [max(1, int(size * llm.prompt_tokens / 161)) for size in drawn.prompts]
    outputs = [max(1, int(size * llm.output_tokens / 338)) for size in drawn.outputs]
    return drawn._replace(prompts=prompts, outputs=outputs)


def csv_rows(name: str) -> list[dict[str, str]]:
    """The rows of a file of this folder, by column."""
    with (HERE / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))
