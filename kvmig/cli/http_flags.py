"""Flags about what a front end takes, and how much of it waits."""

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
    group.add_argument(
        "--max-waiting",
        type=int,
        default=usual.max_waiting,
        metavar="REQUESTS",
        help="while so many wait for their first token, further ones of their priority and those"
        " after are answered 429; 0: no limit",
    )
    group.add_argument(
        "--max-unread",
        type=int,
        default=usual.max_unread,
        metavar="TOKENS",
        help="a request is failed when its client has not read for more tokens; 0: no limit",
    )
    group.add_argument(
        "--read-timeout",
        type=float,
        default=usual.read_timeout_s,
        metavar="SECONDS",
        help="a connection is closed when its client has not read for so long",
    )


def http_config(flags: argparse.Namespace) -> HttpConfig:
    """What was given; not checked yet."""
    return HttpConfig(
        max_body=int(flags.max_body),
        body_timeout_s=flags.body_timeout,
        max_waiting=flags.max_waiting,
        max_unread=flags.max_unread,
        read_timeout_s=flags.read_timeout,
    )
