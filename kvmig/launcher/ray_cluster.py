"""A Ray cluster: joining it, its nodes, and whether they have room for the instances."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvmig.core.errors import ConfigError
from kvmig.launcher import ray_door
from kvmig.launcher.ray_door import within
from kvmig.launcher.ray_resources import EXAMPLE, Resources, amounts

AUTO = "auto"
PROBE_TIMEOUT_S = 5.0
ADDRESS_VARIABLE = "RAY_ADDRESS"
"""Ray's own: which cluster `auto` is."""
ALLOWED = "must be auto or HOST:PORT of a Ray cluster's head"

NONE_HERE = (
    "--ray is auto, but this machine is no node of a Ray cluster: make it one with `ray start`,"
    " or name the cluster's HOST:PORT"
)


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node of a Ray cluster."""

    node_id: str
    address: str
    total: Resources
    free: Resources
    name: str = ""
    """The name that it was started with; without that its address."""
    host: str = ""


# -- this process as a driver: these block, and run in a thread other than the main one, where Ray
# leaves the handlers of signals alone


def connect(address: str, *, checked: bool = False) -> None:
    """Join the cluster as a driver, within `JOIN_S`. Raises ConfigError with one line.

    checked: another process has seen that the cluster asks for a token if one is set here.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs the package ray: pip install 'kvmig[ray]'") from error
    head = _head_of(address)
    _probe(address, head)
    try:
        within(ray_door.JOIN_S, partial(_join, address, head, checked=checked))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--ray is {_said(address, head)}, but that cluster can't be joined within"
            f" {ray_door.JOIN_S:g} s: if it is gone, start it again with `ray start`"
        ) from error
    except ConfigError:
        ray.shutdown()
        raise
    except Exception as error:
        ray.shutdown()
        raise ConfigError(f"--ray is {_said(address, head)}: {_sentence(error)}") from error


def _join(address: str, head: str, *, checked: bool) -> None:
    import ray

    ray_door.ask_head(
        head, local=address == AUTO and os.environ.get(ADDRESS_VARIABLE, "") in ("", AUTO)
    )
    if not checked:
        ray_door.check_token_wanted(head)
    # Ray's own lines would stand between ours; what instances print comes through.
    ray.init(address=head, logging_level=logging.ERROR, log_to_driver=True)


def _head_of(address: str) -> str:
    """HOST:PORT of the head; of auto as Ray finds it. Raises ConfigError."""
    if address != AUTO:
        return address
    from ray._private import services

    services.find_gcs_addresses.cache_clear()  # of an earlier cluster
    try:
        found: str | None = services.canonicalize_bootstrap_address(AUTO)
    except ConnectionError as error:
        raise ConfigError(NONE_HERE) from error
    except ValueError:
        found = None
    if found is None:
        named = os.environ.get(ADDRESS_VARIABLE, "")
        raise ConfigError(f"{ADDRESS_VARIABLE} is {named!r}, {ALLOWED}")
    return found


def _said(address: str, head: str) -> str:
    return address if address == head else f"{address} ({head})"


def disconnect() -> None:
    """Leave; Ray ends all actors of ours. May be called twice."""
    import ray

    ray.shutdown()


def nodes() -> list[RayNode]:
    """The nodes that are alive."""
    import ray

    # Not public, but the only way to it without Ray's dashboard; vLLM's Ray executor uses it.
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    rows: list[dict[str, Any]] = ray.nodes()
    return [
        RayNode(
            row["NodeID"],
            row["NodeManagerAddress"],
            row["Resources"],
            free.get(row["NodeID"], {}),
            row["NodeName"],
            row["NodeManagerHostname"],
        )
        for row in rows
        if row["Alive"]
    ]


def request_nodes(bundles: Sequence[Resources]) -> None:
    """Ask Ray's autoscaler for nodes that hold all of these, with what runs there. It holds until
    the next call, also of another process."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=[dict(one) for one in bundles])


def _probe(address: str, head: str) -> None:
    """Ray would try for a minute, and then speak of timeouts of its own."""
    try:
        socket.create_connection(_split(head), PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"--ray is {_said(address, head)}, but no Ray cluster answers there: {error}"
        ) from error


def last_line(error: Exception) -> str:
    """The last line of Ray's explanation, which has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# -- flags


def checked_address(address: str) -> str:
    """`address`, if it can be one. Raises ConfigError."""
    if address != AUTO:
        _split(address)
    return address


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    known = colon and host and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
    if not known:
        raise ConfigError(f"--ray is {address!r}, {ALLOWED}")
    return host.strip("[]"), int(port)


# -- what instances take


def check_sizes(nodes: Sequence[RayNode], needs: Sequence[Resources]) -> None:
    """Raise ConfigError unless each instance fits on some node, were it empty."""
    names = {name for node in nodes for name in node.total}
    for name in sorted({name for need in needs for name in need}):
        if name not in names:
            raise ConfigError(_unknown(name, names))
        most = max(need.get(name, 0.0) for need in needs)
        largest = max(node.total.get(name, 0.0) for node in nodes)
        if most > largest:
            raise ConfigError(
                f"an instance needs {amounts({name: most})}, but the largest node of the Ray"
                f" cluster has {amounts({name: largest})}"
            )


def check_room(nodes: Sequence[RayNode], needs: Sequence[Resources]) -> None:
    """Raise ConfigError unless the nodes have room for all these instances now.

    The largest are placed first, each where the least is left over, so that what fits is found
    for instances that are alike; Ray's own placement may still differ.
    """
    left = [dict(node.free) for node in nodes]
    largest_first = sorted(needs, key=lambda one: sum(one.values()), reverse=True)
    for placed, need in enumerate(largest_first):
        fitting = [free for free in left if has_resources(need, free)]
        if not fitting:
            raise ConfigError(
                f"the Ray cluster has room for {placed} of {len(needs)} instances with"
                f" {amounts(need)} each: lower --instances, or add nodes"
            )
        chosen = min(fitting, key=lambda free: sum(free.get(name, 0.0) for name in need))
        for name, amount in need.items():
            chosen[name] -= amount


def has_resources(need: Resources, free: Resources) -> bool:
    """Whether a node that has these resources left can take it."""
    return all(free.get(name, 0.0) >= amount for name, amount in need.items())


def share_of(need: Resources, total: Resources) -> float:
    """The part of a node that an instance takes, between 0 and 1: of what it takes most of.

    Example: 2 of 8 CPUs and 1 of 2 GPUs: 0.5.
    """
    parts = [amount / total[name] for name, amount in need.items() if total.get(name)]
    return min(1.0, max(parts, default=1.0))


def strategy_of(node: str) -> Any:
    """Ray's scheduling strategy of an actor that runs on this node; empty: anywhere, spread."""
    if not node:
        return "SPREAD"
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def actor_options(need: Resources) -> dict[str, Any]:
    """The same as options of a Ray actor."""
    own = {name: amount for name, amount in need.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": need.get("CPU", 0),
        "num_gpus": need.get("GPU", 0),
        "memory": int(need.get("memory", 0)) or None,
        "resources": own or None,
    }


def _unknown(name: str, names: set[str]) -> str:
    usable = sorted(one for one in names if not one.startswith(("node:", "object_store")))
    has = f"the Ray cluster has no {name}, only {', '.join(usable)}"
    return f"{has}: name what an instance takes with --ray-resources, such as {EXAMPLE}"
