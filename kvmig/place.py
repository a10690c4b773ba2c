"""`python -m kvmig.place`: which models share which GPUs of a cluster. Starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvmig.ground.errors import ConfigError
from kvmig.placement.dedicated import replicas, spatial
from kvmig.placement.estimator import Estimator
from kvmig.placement.greedy import Stuck, best_of_groups
from kvmig.placement.problem import (
    OBJECTIVES,
    Llm,
    Member,
    Plan,
    check,
    cluster_of,
    models_of,
)
from kvmig.placement.search import next_best, search

GIB = 2**30


def _muxserve(estimator: Estimator) -> Plan | Stuck:
    whole = [Member(at, one.rate) for at, one in enumerate(estimator.models)]
    return best_of_groups(estimator, whole)


METHODS: dict[str, Callable[[Estimator], Plan | Stuck]] = {
    "kvmig": search,
    "muxserve": _muxserve,
    "spatial": spatial,
    "replicas": replicas,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 2, with one sentence, when the input can't be used or nothing fits."""
    args = parser().parse_args(argv)
    try:
        cluster = cluster_of(args.cluster)
        models = _read(args.models)
        check(models, cluster)
        estimator = Estimator(models, cluster, args.objective)
        plan = placed(estimator, args.method)
        if args.out is not None:
            _write(args.out, to_toml(estimator, plan))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(to_text(estimator, plan))
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser("python -m kvmig.place", description=__doc__)
    add = flags.add_argument
    add(
        "--models",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="a table [[models]] each: name, model (its costs), rate (requests a second), "
        "prompt_tokens, output_tokens",
    )
    add("--cluster", required=True, metavar="NODESxGPUS:DEVICE", help="such as 4x8:a100-80g")
    add(
        "--objective",
        choices=OBJECTIVES,
        default="slo",
        help="slo (default): requests in time, with room for more; requests: throughput; "
        "paper: throughput weighted by rates, as MuxServe's",
    )
    add(
        "--method",
        choices=METHODS,
        default="kvmig",
        help="kvmig (default): with replicas; muxserve: its Algorithm 1; spatial: each model "
        "on GPUs of its own; replicas: small instances that share nothing",
    )
    add("--out", type=Path, metavar="FILE.toml", help="write the placement there")
    return flags


def placed(estimator: Estimator, method: str) -> Plan:
    """The plan by a method's name. Raises ConfigError with what is missing."""
    plan = METHODS[method](estimator)
    if not isinstance(plan, Stuck):
        return plan
    name = estimator.models[plan.llm].name
    if plan.missing_bytes > 0:
        raise ConfigError(
            f"--method {method} finds no room for model {name}: "
            f"{plan.missing_bytes / GIB:.1f} GiB are missing in the unit with the most room"
        )
    raise ConfigError(
        f"--method {method} finds no unit for model {name}: all have as many models as can be"
    )


def to_text(estimator: Estimator, plan: Plan) -> str:
    """What is printed: the units, what each is expected to do, and why not the next best."""
    lines = [_summary(estimator, plan)]
    for number, (place, unit) in enumerate(zip(where(estimator, plan), plan, strict=True)):
        node, gpus = place
        what = "" if unit.members else ": nobody"
        lines.append(f"\nunit {number}: node {node}, GPUs {_span(gpus)}{what}")
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True):
            llm = estimator.models[member.llm]
            part = "" if member.rate == llm.rate else f" of {llm.rate:.4g}"
            lines.append(
                f"  {llm.name} ({llm.model}, tp {unit.gpus}): {one.throughput:.3g} of "
                f"{member.rate:.3g}{part} req/s, decodes on {one.share:.0%} of the SMs in batches "
                f"of {one.batch:.0f}, {one.latency_s:.1f} s a request, "
                f"{one.kv_bytes / GIB:.1f} GiB of KV cache"
            )
        if unit.members:
            lines.append(f"  {_why(estimator, plan, number)}")
    return "\n".join(lines)


def _summary(estimator: Estimator, plan: Plan) -> str:
    served = sum(one.throughput for unit in plan for one in estimator.unit(unit) or ())
    offered = sum(one.rate for one in estimator.models)
    weighted = sum(
        estimator.models[member.llm].rate * one.throughput
        for unit in plan
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True)
    )
    idle = sum(unit.gpus for unit in plan if not unit.members)
    idle += estimator.cluster.nodes * estimator.cluster.gpus - sum(unit.gpus for unit in plan)
    return (
        f"{served:.4g} of {offered:.4g} requests a second expected, "
        f"{weighted / len(estimator.models):.4g} on MuxServe's axis; {idle} GPUs idle"
    )


def _why(estimator: Estimator, plan: Plan, number: int) -> str:
    found = next_best(estimator, plan, number)
    if found is None:
        return "no other place: nobody else has room for any of them"
    llm, share, to, loss = found
    part = "half of " if share < 1 else ""
    total = estimator.total(plan)
    size = plan[to].gpus
    return (
        f"next best: {part}{estimator.models[llm].name} in unit {to} ({size} GPUs), "
        f"{estimator.objective} {loss / total:.2%} lower"
    )


def to_toml(estimator: Estimator, plan: Plan) -> str:
    """The placement as a file; the same plan gives the same bytes."""
    lines = [f'objective = "{estimator.objective}"', ""]
    for (node, gpus), unit in zip(where(estimator, plan), plan, strict=True):
        if not unit.members:
            continue
        lines += ["[[units]]", f"node = {node}", f"gpus = {gpus}", ""]
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True):
            lines += [
                "[[units.models]]",
                f"name = {json.dumps(estimator.models[member.llm].name, ensure_ascii=False)}",
                f"rate = {member.rate!r}",
                f"decode_share = {round(one.share, 4)!r}",
                f"batch = {round(one.batch)}",
                f"kv_bytes = {int(one.kv_bytes)}",
                f"expected_rate = {round(one.throughput, 6)!r}",
                "",
            ]
    return "\n".join(lines)


def where(estimator: Estimator, plan: Plan) -> list[tuple[int, list[int]]]:
    """Node and GPUs of each unit, large ones first: the first node with room."""
    cluster = estimator.cluster
    taken = [0] * cluster.nodes
    found: list[tuple[int, list[int]]] = []
    for unit in plan:
        node = next(at for at, used in enumerate(taken) if used + unit.gpus <= cluster.gpus)
        found.append((node, list(range(taken[node], taken[node] + unit.gpus))))
        taken[node] += unit.gpus
    return found


def _span(gpus: Sequence[int]) -> str:
    return f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


def _read(file: Path) -> list[Llm]:
    try:
        return models_of(file.read_text(encoding="utf-8"), f"--models {file}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--models {file} can't be read: {error}") from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file} can't be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
