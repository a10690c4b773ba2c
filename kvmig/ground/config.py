"""What a cluster is told at start: frozen, checked at the door, sent to every process."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from kvmig.ground.errors import ConfigError
from kvmig.ground.faults import FaultConfig, check_faults
from kvmig.ground.http import HttpConfig, check_http
from kvmig.ground.lifecycle import LifecycleConfig, check_lifecycle
from kvmig.ground.priorities import NORMAL, PriorityClass, check_classes
from kvmig.ground.scaling import ScalingConfig, check_scaling

PolicyName = Literal[
    "kvmig",
    "freeness",
    "llumnix",
    "llumnix-base",
    "llumnix-artifact",
    "least-loaded",
    "round-robin",
]
EngineName = Literal["vllm", "transformers", "toy"]
Transport = Literal["auto", "shm", "tcp", "cuda-ipc", "nixl"]
POLICIES: tuple[str, ...] = get_args(PolicyName)
ENGINES: tuple[str, ...] = get_args(EngineName)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
IN_THE_CLEAR = ("nixl",)
"""Transports whose sockets are not ours: they don't encrypt, and don't ask who connects."""


class MigrationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one request moves. Times in milliseconds, sizes in bytes."""

    chunk_ms: float = 2.0
    """Longest time that one copy should take; a copy is of one KV block at least."""
    chunk_bytes: int = 1 << 20
    """Staging buffer of one chunk; at least one KV block, however small this is."""
    staging_chunks: int = 4
    """Staging buffers of one instance: bounds memory and what is on the wire."""
    max_stages: int = 8
    """Live copy stages before the last one is forced; 0: all is copied in the pause."""
    spread: float = 0.1
    """By how much of a step each of the tokens before the pause may reach its client later than the
    one before, so that the pause is spread over them; 0: it isn't."""
    unit_tokens: int = 0
    """Tokens of KV cache that instances of different shapes exchange at a time; 0: all are
    alike and exchange blocks."""
    transport: Transport = "auto"
    trust_network: bool = False
    """Whether KV blocks may go over sockets that are neither encrypted nor authenticated."""
    max_bandwidth: float = 0.0
    """Bytes a second of KV cache out of an instance; 0: no cap."""
    max_pair_bandwidth: float = 0.0
    """Bytes a second of KV cache from one instance to another; 0: no cap."""
    max_migrations: int = 4
    """Migrations at once out of an instance, and into it."""
    max_migration_bytes: int = 0
    """KV cache that is on the move at once out of an instance, and into it; 0: no limit."""
    reply_timeout_ms: float = 2000.0
    """Wait for a peer's answer before a migration is given up."""
    lease_ms: float = 10000.0
    """A destination frees a reservation that heard nothing for this long."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The global scheduler: dispatch and migration.

    Freeness is in KV blocks a request, see `kvmig.controlplane.freeness`; None: the policy's own.
    """

    policy: PolicyName = "kvmig"
    migration: bool = True
    round_ms: float = 200.0
    inexact_moves: bool = False
    """Whether policies move requests between numerics classes, where tokens may differ."""
    source_below: float | None = None
    """An instance whose freeness is under this is a source of migrations."""
    destination_above: float | None = None
    """An instance whose freeness is over this may take requests in."""
    min_gain: float | None = None
    """Least predicted growth of the lower freeness of two that makes a pair worth it."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster whose nodes run the instances."""

    address: str = "auto"
    """HOST:PORT of its head, or auto: the one that this machine is a node of."""
    resources: dict[str, float] = {}
    """What an instance takes, by Ray's names; none: a GPU a worker."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that all processes of one cluster agree on."""

    engine: EngineName = "vllm"
    """What the instances are, all of them."""
    instances: int = 2
    instance_flags: tuple[str, ...] = ()
    """As given: "iN: FLAGS", the engine's flags that only instance N gets."""
    ray: RayConfig | None = None
    """None: all instances run on this host."""
    control_host: str = "127.0.0.1"
    """Address that llumlets and scheduler bind their sockets to."""
    report_ms: float = 50.0
    """Longest time between two load reports of an instance."""
    start_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0
    """How long SIGTERM lets running requests finish."""
    migration: MigrationConfig = MigrationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    scaling: ScalingConfig | None = None
    """None: as many instances as at the start."""
    lifecycle: LifecycleConfig = LifecycleConfig()
    priorities: tuple[PriorityClass, ...] = (NORMAL,)
    """First to run first; one has priority 0."""
    faults: FaultConfig = FaultConfig()
    http: HttpConfig = HttpConfig()


def check(config: ClusterConfig) -> ClusterConfig:
    """Refuse values that can't work, by name; returns `config` unchanged.

    Raises ConfigError with the field, its value and what is allowed.
    """
    scheduler, migration = config.scheduler, config.migration
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (config.engine in ENGINES, "--engine", config.engine, " or ".join(ENGINES)),
        (config.instances >= 1, "--instances", config.instances, "1 or more"),
        (config.report_ms > 0, "--report-ms", config.report_ms, "more than 0"),
        (config.drain_timeout_s >= 0, "--drain-timeout", config.drain_timeout_s, "0 or more"),
        (config.start_timeout_s > 0, "--start-timeout", config.start_timeout_s, "more than 0"),
        (scheduler.policy in POLICIES, "--policy", scheduler.policy, " or ".join(POLICIES)),
        (scheduler.round_ms > 0, "--round-ms", scheduler.round_ms, "more than 0"),
        (
            scheduler.source_below is None
            or scheduler.destination_above is None
            or scheduler.source_below <= scheduler.destination_above,
            "--migrate-below",
            scheduler.source_below,
            f"at most --migrate-above ({scheduler.destination_above})",
        ),
        ((scheduler.min_gain or 0) >= 0, "--min-gain", scheduler.min_gain, "0 or more"),
        (migration.chunk_ms > 0, "--chunk-ms", migration.chunk_ms, "more than 0"),
        (migration.chunk_bytes >= 4096, "--chunk-bytes", migration.chunk_bytes, "4096 or more"),
        (migration.staging_chunks >= 1, "--staging-chunks", migration.staging_chunks, "1 or more"),
        (migration.max_stages >= 0, "--max-stages", migration.max_stages, "0 or more"),
        (migration.max_bandwidth >= 0, "--max-bandwidth", migration.max_bandwidth, "0 or more"),
        (
            migration.max_pair_bandwidth >= 0,
            "--max-pair-bandwidth",
            migration.max_pair_bandwidth,
            "0 or more",
        ),
        (migration.max_migrations >= 1, "--max-migrations", migration.max_migrations, "1 or more"),
        (
            migration.max_migration_bytes >= 0,
            "--max-migration-bytes",
            migration.max_migration_bytes,
            "0 or more",
        ),
        (
            migration.reply_timeout_ms > 0,
            "--reply-timeout-ms",
            migration.reply_timeout_ms,
            "more than 0",
        ),
        (
            migration.lease_ms > migration.reply_timeout_ms,
            "--lease-ms",
            migration.lease_ms,
            f"more than --reply-timeout-ms ({migration.reply_timeout_ms})",
        ),
        (0 <= migration.spread <= 1, "--spread", migration.spread, "0 to 1"),
        (
            migration.transport in TRANSPORTS,
            "--transport",
            migration.transport,
            " or ".join(TRANSPORTS),
        ),
        (
            migration.trust_network or migration.transport not in IN_THE_CLEAR,
            "--transport",
            migration.transport,
            "auto, shm, tcp or cuda-ipc, or be given with --trust-network",
        ),
    )
    for holds, field, value, allowed in rules:
        if not holds:
            raise ConfigError(f"{field} is {value}, must be {allowed}")
    check_lifecycle(config.lifecycle, config.instances)
    check_classes(config.priorities)
    if config.scaling is not None:
        check_scaling(config.scaling, config.instances)
    check_faults(config.faults, config.report_ms)
    check_http(config.http)
    return config
