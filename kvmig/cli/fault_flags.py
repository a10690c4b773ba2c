"""Flags that say what a fault is, and for how long it is borne."""

from __future__ import annotations

import argparse

from kvmig.ground.faults import FaultConfig


def add_fault_flags(root: argparse.ArgumentParser) -> None:
    """Add the group to the parser of kvmig's flags."""
    default = FaultConfig()
    group = root.add_argument_group("faults")
    group.add_argument(
        "--silent-after",
        type=float,
        default=default.silent_after_s,
        help="seconds without a word from an instance after which its requests run again elsewhere",
    )
    group.add_argument(
        "--hung-after",
        type=float,
        default=default.hung_after_s,
        help="seconds of one step of an engine after which its requests run again elsewhere;"
        " after twice that it is ended, and started again",
    )
    group.add_argument(
        "--instance-wait",
        type=float,
        default=default.instance_wait_s,
        help="seconds that requests of a lost instance wait for one that they can run on",
    )
    group.add_argument(
        "--max-crashes",
        type=int,
        default=default.max_crashes,
        help="a request that ran on so many instances as they crashed isn't run again",
    )


def fault_config(flags: argparse.Namespace) -> FaultConfig:
    """What was given; not checked yet."""
    return FaultConfig(
        silent_after_s=flags.silent_after,
        hung_after_s=flags.hung_after,
        instance_wait_s=flags.instance_wait,
        max_crashes=flags.max_crashes,
    )
