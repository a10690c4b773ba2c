"""Nodes of a Ray cluster as their agents would report them."""

from __future__ import annotations

from typing import Any

from kvmig.launcher.node_reports import ClusterReport, NodeMeasure, NodeReport

GIB = 1 << 30


def node_id(letter: str) -> str:
    """An id as Ray makes it."""
    return 56 * letter


def made_up_node(letter: str, memory: int = 8 * GIB, **more: Any) -> NodeReport:
    """A node with four CPUs that is called by a letter of a to f."""
    usual: dict[str, Any] = {
        "node_id": node_id(letter),
        "name": f"worker-{letter}",
        "host": "host",
        "address": "10.0.0.1",
        "total": {"CPU": 4.0},
        "free": {"CPU": 4.0},
        "measured": NodeMeasure(memory_total=memory, memory_free=memory),
    }
    return NodeReport(**{**usual, **more})


def cluster_of(*nodes: NodeReport) -> ClusterReport:
    """A cluster that has these."""
    return ClusterReport(nodes=nodes)
