"""A placement's file under the load that it was made for, in virtual time."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from kvmig.core.errors import ConfigError
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import plan_of, read
from kvmig.placement.problem import ModelLoad, check, cluster_of, models_of
from kvmig_tools.sim.mux import SCALES, Load, poisson, simulate

SHARE_GPT = (161, 338)
"""Mean tokens of `share_gpt`'s prompts and answers."""


def simulate_placement(
    placement: Path, models: Path, cluster: str, requests: int, seed: int
) -> Table:
    """Each model's requests a second beside what the placement expects, and shares in time.

    requests: of all models together. Arrivals are Poisson's, lengths ShareGPT's, stretched to the
    models' means. Raises ConfigError for what can't be used.
    """
    where = f"--placement {placement}"
    found = read(_text("--placement", placement), where)
    llms = models_of(_text("--models", models), f"--models {models}")
    site = cluster_of(cluster)
    check(llms, site)
    estimator = PlanEstimator(llms, site, "slo")
    plan = plan_of(found, estimator, where)
    placed = {member.llm for unit in plan for member in unit.members}
    if missing := [one.name for at, one in enumerate(llms) if at not in placed]:
        raise ConfigError(f"{where}: model {missing[0]} has no place")
    total = sum(one.rate for one in llms)
    loads = [
        _load(one, max(20, round(requests * one.rate / total)), seed + 2 * at)
        for at, one in enumerate(llms)
    ]
    outcome = simulate(estimator, plan, loads)
    shown = Table(title=f"{placement}, {outcome.requests} requests")
    for heading in ("model", "req/s", "expected", "offered"):
        shown.add_column(heading, justify="left" if heading == "model" else "right")
    for at, one in enumerate(llms):
        expected = sum(
            there.throughput
            for unit in plan
            for member, there in zip(unit.members, estimator.unit(unit) or (), strict=True)
            if member.llm == at
        )
        cells = (outcome.throughput[at], expected, one.rate)
        shown.add_row(one.name, *(f"{cell:.4g}" for cell in cells))
    shown.caption = ", ".join(
        f"{outcome.in_time[scale]:.1%} within {scale} times their time alone" for scale in SCALES
    )
    return shown


def _load(llm: ModelLoad, count: int, seed: int) -> Load:
    load = poisson(llm, count, seed)
    prompt, output = SHARE_GPT
    return load._replace(
        prompts=[max(1, round(one * llm.prompt_tokens / prompt)) for one in load.prompts],
        outputs=[max(1, round(one * llm.output_tokens / output)) for one in load.outputs],
    )


def _text(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file} can't be read: {error}") from error
