"""Flags about how many instances and front ends there are, and when there are more or fewer."""

from __future__ import annotations

import argparse

from kvmig.ground.errors import ConfigError
from kvmig.ground.lifecycle import USUAL_MOST, LifecycleConfig
from kvmig.ground.scaling import ScalingConfig


def add_lifecycle_flags(root: argparse.ArgumentParser) -> None:
    """Add the group to the parser of kvmig's flags."""
    usual = LifecycleConfig()
    group = root.add_argument_group("instances and front ends")
    group.add_argument(
        "--max-instances",
        type=int,
        default=argparse.SUPPRESS,
        help="instances at once, at most"
        f" (default: {USUAL_MOST}, or --instances where that is more)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        default=usual.max_restarts,
        help="how often in a row an instance is started again that dies soon after",
    )
    group.add_argument(
        "--drain-deadline",
        type=float,
        default=usual.drain_deadline_s,
        metavar="SECONDS",
        help="what a drain hasn't moved by then goes on elsewhere by recompute",
    )
    group.add_argument(
        "--front-ends",
        type=int,
        default=usual.front_ends,
        help="HTTP processes that share the port",
    )
    scaling = ScalingConfig()
    group = root.add_argument_group("autoscaling")
    group.add_argument(
        "--autoscale",
        metavar="X,Y",
        help="keep the mean freeness (KV blocks by which each request can grow) between X and Y,"
        " by adding instances and draining some; the paper: 10,60",
    )
    group.add_argument(
        "--min-instances", type=int, default=scaling.min_instances, help="at least so many"
    )
    group.add_argument(
        "--scale-sustain",
        type=float,
        default=scaling.sustain_s,
        metavar="SECONDS",
        help="how long freeness must be outside before something is done",
    )
    group.add_argument(
        "--scale-cooldown",
        type=float,
        default=scaling.cooldown_s,
        metavar="SECONDS",
        help="least time from the last change to the next drain",
    )


def lifecycle(flags: argparse.Namespace) -> LifecycleConfig:
    """What the flags say."""
    return LifecycleConfig(
        max_instances=getattr(flags, "max_instances", max(USUAL_MOST, flags.instances)),
        max_restarts=flags.max_restarts,
        drain_deadline_s=flags.drain_deadline,
        front_ends=flags.front_ends,
    )


def scaling(flags: argparse.Namespace) -> ScalingConfig | None:
    """What the flags say; None without --autoscale. Raises ConfigError."""
    if flags.autoscale is None:
        return None
    try:
        low, high = map(float, flags.autoscale.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--autoscale is {flags.autoscale}, must be x,y with 0 <= x < y"
        ) from error
    return ScalingConfig(
        low=low,
        high=high,
        min_instances=flags.min_instances,
        max_instances=lifecycle(flags).max_instances,
        sustain_s=flags.scale_sustain,
        cooldown_s=flags.scale_cooldown,
    )
