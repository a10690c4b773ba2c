"""kvmig's own flags; whatever is not one of them is the engine's."""

from __future__ import annotations

import argparse
from typing import NoReturn

import msgspec

from kvmig.cli.fault_flags import add_fault_flags, fault_config
from kvmig.cli.http_flags import add_http_flags, http_config
from kvmig.cli.lifecycle_flags import add_lifecycle_flags, lifecycle, scaling
from kvmig.cli.priority_flags import add_priority_flags, priority_classes
from kvmig.cli.quantity import quantity
from kvmig.cli.ray_flags import add_ray_flags, ray_config
from kvmig.ground.config import (
    ENGINES,
    IN_THE_CLEAR,
    POLICIES,
    TRANSPORTS,
    ClusterConfig,
    MigrationConfig,
    SchedulerConfig,
    check,
)
from kvmig.ground.errors import ConfigError

_EPILOG = """Every other flag is the engine's (vLLM's, unless --engine says otherwise) and goes to
each instance, e.g. --host, --port, --max-model-len, --api-key; `--help=all` lists those too."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser() -> argparse.ArgumentParser:
    """The parser of kvmig's own flags, in groups."""
    cluster, scheduler, migration = ClusterConfig(), SchedulerConfig(), MigrationConfig()
    root = _Parser(
        prog="python -m kvmig.serve",
        usage="python -m kvmig.serve MODEL [kvmig's flags] [any flag of vllm serve]",
        description="Serve MODEL on several vLLM instances; requests move between them live.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    root.add_argument(
        "-h", "--help", nargs="?", const="kvmig", metavar="all", default=None, help="this text"
    )

    group = root.add_argument_group("cluster")
    group.add_argument(
        "--engine", default=cluster.engine, help=f"what instances are: {', '.join(ENGINES)}"
    )
    group.add_argument(
        "--instances", type=int, default=cluster.instances, help="instances to start"
    )
    group.add_argument(
        "--instance-flags",
        action="append",
        default=[],
        metavar="'iN: FLAGS'",
        help="the engine's flags that only instance N gets, e.g. 'i1: --tensor-parallel-size 2';"
        " may be given several times",
    )
    group.add_argument(
        "--control-host",
        default=cluster.control_host,
        help="address that control sockets bind to; the cluster's secret is KVMIG_SECRET if set",
    )
    group.add_argument(
        "--report-ms",
        type=float,
        default=cluster.report_ms,
        help="longest time between two load reports of an instance",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=cluster.start_timeout_s,
        help="seconds for an instance to be ready",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=cluster.drain_timeout_s,
        help="seconds that SIGTERM lets running requests finish",
    )

    add_http_flags(root)
    add_ray_flags(root)
    add_lifecycle_flags(root)

    group = root.add_argument_group("scheduler")
    group.add_argument(
        "--policy",
        default=scheduler.policy,
        help=f"where new requests go and what moves: {', '.join(POLICIES)}",
    )
    group.add_argument(
        "--no-migration",
        action="store_true",
        help="never move a request (the admin API refuses, too)",
    )
    group.add_argument(
        "--inexact-moves",
        action="store_true",
        help="requests may also move between instances whose logits round differently (other"
        " tensor-parallel sizes, devices, thread counts): their tokens may differ from then on",
    )
    group.add_argument(
        "--round-ms", type=float, default=scheduler.round_ms, help="time between two rounds"
    )
    group.add_argument(
        "--migrate-below",
        type=float,
        default=scheduler.source_below,
        help="freeness under which an instance gives requests away (None: the policy's own)",
    )
    group.add_argument(
        "--migrate-above",
        type=float,
        default=scheduler.destination_above,
        help="freeness over which an instance takes requests in (None: the policy's own)",
    )
    group.add_argument(
        "--min-gain",
        type=float,
        default=scheduler.min_gain,
        help="least predicted gain of freeness that makes a move worth it",
    )

    add_priority_flags(root)
    add_fault_flags(root)

    group = root.add_argument_group("migration")
    group.add_argument(
        "--transport",
        default=migration.transport,
        help=f"how KV blocks travel: {', '.join(TRANSPORTS)}",
    )
    group.add_argument(
        "--trust-network",
        action="store_true",
        help="KV blocks may travel unencrypted, and from whoever connects: what"
        f" {', '.join(IN_THE_CLEAR)} do",
    )
    group.add_argument(
        "--chunk-ms",
        type=float,
        default=migration.chunk_ms,
        help="longest uninterrupted copy of several KV blocks (copies run beside the engine's"
        " thread)",
    )
    group.add_argument(
        "--chunk-bytes",
        type=int,
        default=migration.chunk_bytes,
        help="size of a staging buffer; one KV block where that is larger",
    )
    group.add_argument(
        "--staging-chunks",
        type=int,
        default=migration.staging_chunks,
        help="staging buffers an instance",
    )
    group.add_argument(
        "--max-stages",
        type=int,
        default=migration.max_stages,
        help="live copy stages at most; 0: suspend first, then copy everything",
    )
    group.add_argument(
        "--spread",
        type=float,
        default=migration.spread,
        help="the pause is spread over the tokens before it: each reaches its client later than the"
        " one before by at most so much of a step; 0: it isn't",
    )
    group.add_argument(
        "--max-bandwidth",
        type=quantity("MB"),
        default=migration.max_bandwidth,
        metavar="MB/s",
        help="KV cache a second out of an instance, in MB or with a unit (1.5GB); 0: no cap",
    )
    group.add_argument(
        "--max-pair-bandwidth",
        type=quantity("MB"),
        default=migration.max_pair_bandwidth,
        metavar="MB/s",
        help="the same from one instance to another",
    )
    group.add_argument(
        "--max-migrations",
        type=int,
        default=migration.max_migrations,
        help="migrations at once out of an instance, where more wait, and into it",
    )
    group.add_argument(
        "--max-migration-bytes",
        type=quantity("B"),
        default=migration.max_migration_bytes,
        metavar="BYTES",
        help="KV cache on the move at once, each way, in bytes or with a unit; 0: no limit",
    )
    group.add_argument(
        "--reply-timeout-ms",
        type=float,
        default=migration.reply_timeout_ms,
        help="wait for a peer's answer",
    )
    group.add_argument(
        "--lease-ms",
        type=float,
        default=migration.lease_ms,
        help="silence after which a destination frees a reservation",
    )
    return root


def parse(argv: list[str]) -> tuple[ClusterConfig, list[str], str | None]:
    """Returns (checked config, the engine's part of `argv`, what --help asked for).

    Raises ConfigError with the flag, its value and what is allowed.
    """
    flags, rest = parser().parse_known_args(argv)
    try:
        config = ClusterConfig(
            engine=flags.engine,
            instances=flags.instances,
            instance_flags=tuple(flags.instance_flags),
            ray=ray_config(flags),
            control_host=flags.control_host,
            report_ms=flags.report_ms,
            start_timeout_s=flags.start_timeout,
            drain_timeout_s=flags.drain_timeout,
            lifecycle=lifecycle(flags),
            scaling=scaling(flags),
            priorities=priority_classes(flags),
            faults=fault_config(flags),
            http=http_config(flags),
            scheduler=SchedulerConfig(
                policy=flags.policy,
                migration=not flags.no_migration,
                inexact_moves=flags.inexact_moves,
                round_ms=flags.round_ms,
                source_below=flags.migrate_below,
                destination_above=flags.migrate_above,
                min_gain=flags.min_gain,
            ),
            migration=MigrationConfig(
                chunk_ms=flags.chunk_ms,
                chunk_bytes=flags.chunk_bytes,
                staging_chunks=flags.staging_chunks,
                max_stages=flags.max_stages,
                spread=flags.spread,
                transport=flags.transport,
                trust_network=flags.trust_network,
                max_bandwidth=flags.max_bandwidth,
                max_pair_bandwidth=flags.max_pair_bandwidth,
                max_migrations=flags.max_migrations,
                max_migration_bytes=int(flags.max_migration_bytes),
                reply_timeout_ms=flags.reply_timeout_ms,
                lease_ms=flags.lease_ms,
            ),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    return check(config), rest, flags.help
