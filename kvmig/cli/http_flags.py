"""Flags about what a front end takes from one call."""

from __future__ import annotations

import argparse

from kvmig.cli.quantity import quantity
from kvmig.ground.http import HttpConfig


def add_http_flags(root: argparse.ArgumentParser) -> None:
    """Add the group to the parser of kvmig's flags."""
    usual = HttpConfig()
    group = root.add_argument_group("HTTP")
    group.add_argument(
        "--max-body",
        type=quantity("MB"),
        default=f"{usual.max_body // 10**6}MB",
        metavar="MB",
        help="size of a call's body at most, in MB or with a unit",
    )
    group.add_argument(
        "--body-timeout",
        type=float,
        default=usual.body_timeout_s,
        metavar="SECONDS",
        help="time for a call's body to arrive",
    )


def http_config(flags: argparse.Namespace) -> HttpConfig:
    """What was given; not checked yet."""
    return HttpConfig(max_body=int(flags.max_body), body_timeout_s=flags.body_timeout)
