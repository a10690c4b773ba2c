"""`--ray [ADDRESS]` and `--ray-resources JSON`."""

from __future__ import annotations

import argparse

from kvmig.cli.ray_cluster import AUTO, checked_address
from kvmig.cli.ray_resources import parse_resources
from kvmig.ground.config import RayConfig
from kvmig.ground.errors import ConfigError


def add_ray_flags(root: argparse.ArgumentParser) -> None:
    """Add the group to the parser of kvmig's flags."""
    group = root.add_argument_group("many machines")
    group.add_argument(
        "--ray",
        nargs="?",
        const=AUTO,
        default=None,
        metavar="ADDRESS",
        help="place the instances on the nodes of a Ray cluster: HOST:PORT of its head, or the"
        " cluster that this machine is a node of",
    )
    group.add_argument(
        "--ray-resources",
        default="",
        metavar="JSON",
        help="what each instance takes of a node, such as '{\"CPU\": 4}'; one GPU a worker"
        " unless given",
    )


def ray_config(flags: argparse.Namespace) -> RayConfig | None:
    """None: all instances run on this host. Raises ConfigError."""
    resources = parse_resources(flags.ray_resources)
    if flags.ray is None:
        if resources:
            raise ConfigError(f"--ray-resources is {flags.ray_resources!r}, but --ray is not given")
        return None
    return RayConfig(address=checked_address(flags.ray), resources=resources)
