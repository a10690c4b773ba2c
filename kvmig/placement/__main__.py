"""`python -m kvmig.placement`: which models share which GPUs of a cluster. Starts nothing."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvmig.core.errors import ConfigError
from kvmig.placement.dedicated import replicas, spatial
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import (
    PlacedUnit,
    UnitPlacement,
    placement_of,
    plan_of,
    read,
    to_toml,
    where,
)
from kvmig.placement.greedy import UnplacedMember, best_of_groups, place, place_by_memory
from kvmig.placement.meshes import Group, groups
from kvmig.placement.moves import GIB, PlanRefused
from kvmig.placement.problem import (
    OBJECTIVES,
    ModelLoad,
    PlacedInstance,
    Plan,
    check,
    cluster_of,
    models_of,
)
from kvmig.placement.search import next_best, search
from kvmig.placement.told import way_to_text, worth_to_text
from kvmig.placement.way import estimated_leases, estimated_rates, on_units, way_between
from kvmig.placement.worth import worth

Method = Callable[[PlanEstimator, Plan | None], Plan | UnplacedMember]
"""A method of placement, given the present plan, whose units stay as they are cut, or None."""


def _whole(estimator: PlanEstimator) -> list[PlacedInstance]:
    return [PlacedInstance(at, one.rate) for at, one in enumerate(estimator.models)]


def _kvmig(estimator: PlanEstimator, now: Plan | None) -> Plan | UnplacedMember:
    return search(estimator, now=now)


def _muxserve(estimator: PlanEstimator, now: Plan | None) -> Plan | UnplacedMember:
    if now is not None:
        return place(estimator, _whole(estimator), _cut(now))
    return best_of_groups(estimator, _whole(estimator))


def _memory(estimator: PlanEstimator, now: Plan | None) -> Plan | UnplacedMember:
    cluster = estimator.cluster
    cuts = groups(cluster.nodes, cluster.gpus) if now is None else [_cut(now)]
    found = [place_by_memory(estimator, _whole(estimator), one) for one in cuts]
    plans = [one for one in found if not isinstance(one, UnplacedMember)]
    return max(plans, key=lambda one: round(estimator.total(one), 9)) if plans else found[0]


def _cut(now: Plan) -> Group:
    return tuple(sorted((one.gpus for one in now), reverse=True))


def _recut(choose: Callable[[PlanEstimator], Plan | UnplacedMember]) -> Method:
    def method(estimator: PlanEstimator, now: Plan | None) -> Plan | UnplacedMember:
        if now is not None:
            raise ConfigError(
                "--method divides the GPUs into other units, must be kvmig or muxserve or "
                "greedy-memory with --from: units stay as they are while they serve"
            )
        return choose(estimator)

    return method


METHODS: dict[str, Method] = {
    "kvmig": _kvmig,
    "muxserve": _muxserve,
    "greedy-memory": _memory,
    "spatial": _recut(spatial),
    "replicas": _recut(replicas),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return exit status 2, after one error message, when the input can't be used or nothing
    fits."""
    args = parser().parse_args(argv)
    try:
        lines = list(_lines(args))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `| head` has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _lines(args: argparse.Namespace) -> Iterable[str]:
    """The lines to print; a file is written meanwhile. Raises ConfigError."""
    for name in ("start", "load", "link", "horizon"):
        value = getattr(args, name)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name} is {value:g}, must be a number above 0")
    cluster = cluster_of(args.cluster)
    models = _models(args.models)
    check(models, cluster)
    estimator = PlanEstimator(models, cluster, args.objective)
    if args.before is None:
        found = placed(estimator, args.method)
        after = placement_of(estimator, found)
        yield to_text(estimator, found)
    else:
        before = read(_text("--from", args.before), f"--from {args.before}")
        now = plan_of(before, estimator, f"--from {args.before}")
        found = placed(estimator, args.method, now)
        after, units, text = _moves(args, estimator, before, now, found)
        yield to_text(estimator, found, [(one.node, one.gpus) for one in units])
        yield text
    if args.out is not None:
        _write(args.out, to_toml(after))


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser("python -m kvmig.placement", description=__doc__)
    add = flags.add_argument
    add(
        "--models",
        type=Path,
        required=True,
        metavar="FILE.toml",
        help="a table [[models]] for each: name, model (its costs), rate (requests per second), "
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
        help="kvmig (default): with replicas; muxserve: its Algorithm 1; greedy-memory: the "
        "highest rate to the unit with the most memory; spatial: each model on GPUs of its own; "
        "replicas: small instances that share nothing",
    )
    add(
        "--from",
        dest="before",
        type=Path,
        metavar="FILE.toml",
        help="the placement that is: print how to come from there to the new one, and whether "
        "that is worth it; its units stay",
    )
    add("--horizon", type=float, default=600.0, help="seconds for which the new one is meant (600)")
    add(
        "--start",
        type=float,
        default=15.0,
        help="seconds of an instance's start without the load of its weights (15)",
    )
    add("--load", type=float, default=2.0, help="GB of weights that it loads per second (2)")
    add("--link", type=float, default=5.0, help="GB of KV cache that leave it per second (5)")
    add(
        "--fixed-quotas",
        action="store_true",
        help="quotas can't change while instances serve: there is no unit agent",
    )
    add("--out", type=Path, metavar="FILE.toml", help="write the placement there")
    return flags


def placed(estimator: PlanEstimator, method: str, now: Plan | None = None) -> Plan:
    """The plan by a method's name. Raises ConfigError with what is missing."""
    found = METHODS[method](estimator, now)
    if not isinstance(found, UnplacedMember):
        return found
    name = estimator.models[found.llm].name
    if found.missing_bytes > 0:
        raise ConfigError(
            f"--method {method} finds no room for model {name}: "
            f"{found.missing_bytes / GIB:.1f} GiB are missing in the unit with the most room"
        )
    raise ConfigError(
        f"--method {method} finds no unit for model {name}: all have as many models as can be"
    )


def to_text(
    estimator: PlanEstimator, plan: Plan, places: Sequence[tuple[int, Sequence[int]]] | None = None
) -> str:
    """What is printed: the units, what each is expected to do, and why not the next best.

    places: node and GPUs of each unit; None: as they fit.
    """
    lines = [_summary(estimator, plan)]
    for number, (at, unit) in enumerate(zip(places or where(estimator, plan), plan, strict=True)):
        node, gpus = at
        what = "" if unit.members else ": no model"
        lines.append(f"\nunit {number}: node {node}, GPUs {_span(gpus)}{what}")
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True):
            llm = estimator.models[member.llm]
            part = "" if member.rate == llm.rate else f" of {llm.rate:.4g}"
            lines.append(
                f"  {llm.name} ({llm.model}, tp {unit.gpus}): {one.throughput:.3g} of "
                f"{member.rate:.3g}{part} req/s, decodes on {one.share:.0%} of the SMs in batches "
                f"of {one.batch:.0f}, {one.latency_s:.1f} s per request, "
                f"{one.kv_bytes / GIB:.1f} GiB of KV cache"
            )
        if unit.members:
            lines.append(f"  {_why(estimator, plan, number)}")
    return "\n".join(lines)


def _summary(estimator: PlanEstimator, plan: Plan) -> str:
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
        f"{served:.4g} of {offered:.4g} requests per second expected, "
        f"{weighted / len(estimator.models):.4g} on MuxServe's axis; {idle} GPUs idle"
    )


def _why(estimator: PlanEstimator, plan: Plan, number: int) -> str:
    found = next_best(estimator, plan, number)
    if found is None:
        return "no other place: no other unit has room for any of them"
    llm, share, to, loss = found
    part = "half of " if share < 1 else ""
    total = estimator.total(plan)
    size = plan[to].gpus
    return (
        f"next best: {part}{estimator.models[llm].name} in unit {to} ({size} GPUs), "
        f"{estimator.objective} {loss / total:.2%} lower"
    )


def _span(gpus: Sequence[int]) -> str:
    return f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"


# -- from the placement that is


def _moves(
    args: argparse.Namespace,
    estimator: PlanEstimator,
    before: UnitPlacement,
    now: Plan,
    found: Plan,
) -> tuple[UnitPlacement, list[PlacedUnit], str]:
    """The new placement on the units that there are; which of them each of the plan's units is;
    and what is printed about the way there."""
    device = estimator.cluster.device
    start_s = {
        one.name: args.start + device.fixed_bytes(one.model) / args.load / 1e9
        for one in estimator.models
    }
    after = on_units(before, placement_of(estimator, found))
    site = after.site(start_s)._replace(elastic=not args.fixed_quotas, bandwidth=args.link * 1e9)
    way = way_between(
        before,
        after,
        site,
        estimated_leases(estimator, before, now),
        estimated_rates(estimator, before, now),
    )
    if isinstance(way, PlanRefused):
        raise ConfigError(f"--from {args.before}: {way.why}")
    gain = estimator.total(found) - estimator.total(now)
    verdict = worth_to_text(worth(gain, args.horizon, way.delayed), args.horizon)
    text = f"\nfrom {args.before}: {way_to_text(way.waves)}\n{verdict}"
    return way.placement, way.units, text


# -- files


def _models(file: Path) -> list[ModelLoad]:
    return models_of(_text("--models", file), f"--models {file}")


def _text(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file} can't be read: {error}") from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file} can't be written: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
