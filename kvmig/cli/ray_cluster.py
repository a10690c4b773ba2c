"""This process as a driver of a Ray cluster: in, what nodes there are, and out.

All of it blocks and runs in a thread other than the main one, where Ray leaves the handlers of
signals alone.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from kvmig.cli.ray_resources import Node
from kvmig.ground.errors import ConfigError

AUTO = "auto"
PROBE_TIMEOUT_S = 5.0
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own: which cluster `auto` is."""
ALLOWED = "must be auto or HOST:PORT of a Ray cluster's head"

NONE_HERE = (
    "--ray is auto, but this machine is no node of a Ray cluster: make it one with `ray start`,"
    " or name the cluster's HOST:PORT"
)


def checked_address(address: str) -> str:
    """`address`, if it can be one. Raises ConfigError."""
    if address != AUTO:
        _split(address)
    return address


def connect(address: str) -> None:
    """Join the cluster as a driver. Raises ConfigError with one sentence."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs the package ray: pip install 'kvmig[ray]'") from error
    named = os.environ.get(ADDRESS_VARIABLE, "") if address == AUTO else address
    if named and named != AUTO:
        _probe(named)
    try:
        # Ray's own lines would stand between ours; what instances print comes through.
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
    except ConnectionError as error:
        ray.shutdown()
        if address == AUTO and not named:
            raise ConfigError(NONE_HERE) from error
        raise ConfigError(f"--ray is {address}: {_sentence(error)}") from error
    except Exception as error:
        ray.shutdown()
        raise ConfigError(f"--ray is {address}: {_sentence(error)}") from error


def disconnect() -> None:
    """Leave; Ray ends all actors of ours. May be called twice."""
    import ray

    ray.shutdown()


def nodes() -> list[Node]:
    """All that are alive."""
    import ray

    # Not public, but the only way to it without Ray's dashboard; vLLM's Ray executor uses it.
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    rows: list[dict[str, Any]] = ray.nodes()
    return [
        Node(
            row["NodeID"], row["NodeManagerAddress"], row["Resources"], free.get(row["NodeID"], {})
        )
        for row in rows
        if row["Alive"]
    ]


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    known = colon and host and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
    if not known:
        raise ConfigError(f"--ray is {address!r}, {ALLOWED}")
    return host.strip("[]"), int(port)


def _probe(address: str) -> None:
    """Ray would try for a minute, and then speak of timeouts of its own."""
    try:
        socket.create_connection(_split(address), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--ray is {address}, but no Ray cluster answers there: {error}"
        ) from error


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
