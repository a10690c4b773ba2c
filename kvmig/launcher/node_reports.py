"""Reports of the nodes of a Ray cluster for a fleet (JSON, a line each)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvmig.core.devices import DeviceRecord
from kvmig.launcher.node_files import NodeFilesReport


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """A unit on a node."""

    path: str
    """The path that the server wished it by."""
    why: str = ""
    """Why no instance can start in it: its agent does not answer, or it has no GPU yet; empty: one
    can."""
    leased: Mapping[str, int] = {}
    """Bytes of KV cache that members have, by model."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that were taken from Ray for it; empty: not all yet, or it needs none."""


class NodeMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent of a node has measured there. Bytes."""

    memory_total: int
    memory_free: int
    devices: tuple[DeviceRecord, ...] = ()
    missing: str = ""
    """The reason why there are no devices, or which are left out."""
    engines: tuple[str, ...] = ()
    """The engines whose libraries are installed there."""
    files: NodeFilesReport = NodeFilesReport()
    fork_servers: Mapping[str, str] = {}
    """States of the fork servers, by engine: `loading`, `ready`, or why there is none."""
    units: tuple[UnitReport, ...] = ()
    refused: str = ""
    """Why the server's wish was not carried out; empty: it was."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node_id: str
    """Ray's: a node that comes back has another one."""
    name: str
    """The name that it was started with; without that its address."""
    host: str
    address: str
    alive: bool = True
    """Whether Ray counts it as alive; it never does so again once it has not."""
    total: Mapping[str, float] = {}
    """The resources that it has, by Ray's names."""
    free: Mapping[str, float] = {}
    measured: NodeMeasure | None = None
    """The agent's last answer; None: it has not answered yet."""
    silent_s: float = 0.0
    """Seconds since that answer, or since the agent was started."""
    why: str = ""
    """Why the agent doesn't answer; empty: it does, or the reason is not known."""


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cluster: nodes that are alive, and those that were lost since it is watched."""

    nodes: tuple[NodeReport, ...] = ()
    failed: str = ""
    """Why the cluster can't be joined; empty: it is."""


def encode_report(report: ClusterReport) -> bytes:
    """The report as a line."""
    return msgspec.json.encode(report) + b"\n"


def report_of(line: bytes) -> ClusterReport:
    """Raises msgspec.DecodeError."""
    return msgspec.json.decode(line, type=ClusterReport)
