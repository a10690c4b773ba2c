"""Flags about how many instances and front ends there are, and for how long."""

from __future__ import annotations

import argparse

from kvmig.ground.lifecycle import USUAL_MOST, LifecycleConfig


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


def lifecycle(flags: argparse.Namespace) -> LifecycleConfig:
    """What the flags say."""
    return LifecycleConfig(
        max_instances=getattr(flags, "max_instances", max(USUAL_MOST, flags.instances)),
        max_restarts=flags.max_restarts,
        drain_deadline_s=flags.drain_deadline,
        front_ends=flags.front_ends,
    )
