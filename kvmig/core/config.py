"""What a cluster is told at start: frozen, checked at the door, sent to every process."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from kvmig.core.errors import ConfigError
from kvmig.core.priorities import NORMAL, PriorityClass, check_classes

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


USUAL_MOST = 16
"""Instances at most, if neither --max-instances nor --instances says more."""
HEAD_BYTES = 1 << 16
"""Size of a call's first line and headers."""
HEAD_S = 20.0
"""Time for the headers to arrive, from the connection's first moment on."""
KEEP_ALIVE_S = 75
"""Wait for the next call on a connection, longer than clients and proxies keep idle ones (httpx and
so openai, 5 s; aiohttp 15 s; nginx and most load balancers 60 s): the client must close first, or a
call may meet the closing of its connection, which HTTP/1.1 can't tell from a failure."""
SPARE_FILES = 500
"""Open files of a process, at most a quarter of all that it may have, for all but its clients."""
BODIES = 8
"""Number of the largest bodies that may be on their way into one front end at a time."""
SEND_BYTES = 1 << 17
"""Bytes of an answer that the kernel holds for a client that doesn't read (it doubles that)."""


class MigrationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one request moves. Times in milliseconds, sizes in bytes."""

    chunk_ms: float = 2.0
    """Longest time that one copy should take; a copy is of one KV block at least."""
    chunk_bytes: int | None = None
    """Staging buffer of one chunk; at least one KV block, however small this is. None: 1 MiB, or
    32 MiB where the KV cache is on a GPU."""
    staging_buffers: int = 4
    """Staging buffers of one instance: bounds memory and what is on the wire."""
    max_stages: int = 8
    """Live copy stages before the last one is forced; 0: all is copied in the pause."""
    pause_spread: float = 0.1
    """The front end delays the last tokens before a pause by growing amounts, this fraction of a
    step each, so that the client sees several short delays instead of one; 0: off."""
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
    interval_ms: float = 200.0
    inexact_moves: bool = False
    """Whether policies move requests between numerics classes, where tokens may differ."""
    source_below: float | None = None
    """An instance whose freeness is under this is a source of migrations."""
    destination_above: float | None = None
    """An instance whose freeness is over this may take requests in."""
    min_gain: float | None = None
    """Least predicted growth of the lower freeness of two that makes a pair worth it."""


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    heartbeat_timeout_s: float = 1.5
    """An instance without a heartbeat for so long is silent: its requests run again elsewhere."""
    step_timeout_s: float = 60.0
    """An engine whose present step takes longer is hung: the same. After twice that it is
    ended, and started again."""
    failover_timeout_s: float = 120.0
    """How long a request whose instance is lost waits for one that it can run on."""
    max_crashes: int = 2
    """A request that saw so many instances crash or hang while it ran there isn't run again."""


MediaUrls = Literal["public", "named"]
"""public: any host with a public address, and hosts that are named, whatever their addresses.
named: only hosts that are named, at public addresses."""
MEDIA_URLS: tuple[str, ...] = get_args(MediaUrls)


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of calls."""

    max_body: int = 64_000_000
    """Bytes."""
    body_timeout_s: float = 60.0
    """Time for the body to arrive."""
    max_n: int = 16
    """Answers, or beams, to each prompt of one call."""
    max_prompts: int = 256
    """Prompts of one call."""
    max_waiting: int = 10_000
    """Requests of all front ends that wait for their first token; 0: no limit."""
    max_unread: int = 8192
    """Tokens of a request that its client hasn't read; 0: no limit."""
    send_timeout_s: float = 300.0
    """Time for a client to go on reading."""
    usage_spool: str = ""
    """Folder of the files in which front ends keep what calls use; empty: none does."""
    quota_socket: str = ""
    """Path of the Unix socket of who grants tokens to calls whose keys have a quota; empty: none
    has."""
    isolate_users: bool = False
    """Whether nothing that is kept of a user's prompts serves another's."""
    max_media: int = 100_000_000
    """Bytes that the images, audio and video of one call take once they are decoded, with the
    body that they came in."""
    media_urls: MediaUrls = "public"
    """Hosts from which images, audio and video are fetched for clients."""
    uds: str = ""
    """Path of the Unix socket that takes the port's place; empty: none does."""


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The lives of processes. Times in seconds."""

    max_instances: int = USUAL_MOST
    """Most instances at once, including those that start or drain."""
    max_restarts: int = 5
    """How often in a row an instance is started again that dies soon after."""
    drain_deadline_s: float = 300.0
    """What a drain hasn't moved by then goes on elsewhere by recompute."""
    front_ends: int = 1
    """Processes that share the port."""
    front_apart: bool = False
    """Whether also a single front end has a process of its own, so that its end leaves the
    instances."""
    check: bool = False
    """Whether only the flags are read."""
    end_with_stdin: bool = False
    """Whether the end of stdin ends the server as a signal would."""
    heartbeat_descriptor: int = -1
    """A pipe that gets a byte per second while the launcher's event loop turns; -1: none."""


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the mean freeness within [low, high] (Llumnix, section 4.4.3). Times in seconds."""

    low: float = 10.0
    """KV blocks a request: below it for `stabilization_s`, instances are added."""
    high: float = 60.0
    """Above it for `stabilization_s`, one is drained."""
    min_instances: int = 1
    max_instances: int = 16
    stabilization_s: float = 5.0
    cooldown_s: float = 30.0
    """Least time from one instance's end, or start, to the next decision to drain one."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster whose nodes run the instances."""

    address: str = "auto"
    """HOST:PORT of its head, or auto: the one that this machine is a node of."""
    resources: dict[str, float] = {}
    """What an instance takes, by Ray's names; none: a GPU a worker."""


class UnitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The unit whose KV cache the instances share with those of other models."""

    path: str
    """Path of the agent's socket."""
    paths: dict[str, str] = {}
    """Paths for instances of another unit, by instance name or by place in a
    placement."""
    guarantee: int = 0
    """Bytes that an instance gets back whenever it wants them; 0: a fair part."""
    patience_s: float = 2.0
    """Wait for reclaimed memory to become free, before requests are preempted for it."""
    shares: tuple[int, int] | None = None
    """Tenths of the device that a step takes: with prompts, and of decodes alone. None: steps don't
    wait for those of other models."""
    model: str = ""
    """The model's name in the unit."""

    def of(self, instance: str, place: str) -> UnitConfig:
        """The configuration of one instance. place: where it is in a placement."""
        path = self.paths.get(instance) or self.paths.get(place, self.path)
        return msgspec.structs.replace(self, path=path, paths={})


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that all processes of one cluster agree on."""

    engine: EngineName = "vllm"
    """What the instances are, all of them."""
    allow_untested_vllm: bool = False
    instances: int = 2
    instance_flags: tuple[str, ...] = ()
    """Values of the flag, "iN: FLAGS": the engine's flags that only instance N gets."""
    instance_vllm: tuple[str, ...] = ()
    """Values of the flag, "iN: FOLDER": the build of vLLM that instance N is."""
    instance_unit: tuple[str, ...] = ()
    """Values of the flag, "iN: NAME": where instance N is in a placement."""
    ray: RayConfig | None = None
    """Ray's settings; None: all instances run on this host."""
    control_host: str = "127.0.0.1"
    """Address that llumlets and scheduler bind their sockets to."""
    heartbeat_interval_ms: float = 50.0
    """Longest time between two load reports of an instance."""
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    """How long SIGTERM lets running requests finish."""
    migration: MigrationConfig = MigrationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    scaling: ScalingConfig | None = None
    """The autoscaler's settings; None: the number of instances doesn't change."""
    lifecycle: LifecycleConfig = LifecycleConfig()
    priorities: tuple[PriorityClass, ...] = (NORMAL,)
    """First to run first; one has priority 0."""
    faults: FaultConfig = FaultConfig()
    http: HttpConfig = HttpConfig()
    unit: UnitConfig | None = None
    """The unit's settings; None: each instance has KV cache of its own."""


def instance_name(number: int) -> str:
    """Name instance `number`, from 0."""
    return f"i{number}"


def instance_number(name: str) -> int:
    """Invert `instance_name`; the number is below `LifecycleConfig.max_instances`."""
    return int(name.removeprefix("i"))


def check(config: ClusterConfig) -> ClusterConfig:
    """Refuse values that can't work, by name; returns `config` unchanged.

    Raises ConfigError with the flag, its value and what is allowed.
    """
    _one_of("--engine", config.engine, ENGINES)
    _least("--instances", config.instances, 1)
    _positive("--heartbeat-interval-ms", config.heartbeat_interval_ms)
    _least("--shutdown-timeout", config.shutdown_timeout_s, 0)
    _positive("--start-timeout", config.start_timeout_s)
    _check_scheduler(config.scheduler)
    _check_migration(config.migration)
    _check_lifecycle(config.lifecycle, config.instances)
    check_classes(config.priorities)
    if config.scaling is not None:
        check_scaling(config.scaling, config.instances)
    _check_faults(config.faults, config.heartbeat_interval_ms)
    _check_http(config.http)
    if config.unit is not None:
        _check_unit(config.unit, config)
    return config


def check_scaling(scaling: ScalingConfig, instances: int) -> None:
    """Raise ConfigError with the flag, its value and what is allowed.

    instances: how many there are at the start.
    """
    low, high = scaling.low, scaling.high
    least, most = scaling.min_instances, scaling.max_instances
    _require(0 <= low < high, "--autoscale", f"{low:g},{high:g}", "x,y with 0 <= x < y")
    _least("--min-instances", least, 1)
    _require(most >= least, "--max-instances", most, f"at least --min-instances ({least})")
    _require(
        least <= instances <= most,
        "--instances",
        instances,
        f"from --min-instances ({least}) to --max-instances ({most})",
    )
    _least("--scale-stabilization", scaling.stabilization_s, 0)
    _least("--scale-cooldown", scaling.cooldown_s, 0)


def _check_scheduler(scheduler: SchedulerConfig) -> None:
    _one_of("--policy", scheduler.policy, POLICIES)
    _positive("--scheduler-interval-ms", scheduler.interval_ms)
    below, above = scheduler.source_below, scheduler.destination_above
    ordered = below is None or above is None or below <= above
    _require(ordered, "--migrate-below", below, f"at most --migrate-above ({above})")
    _least("--min-gain", scheduler.min_gain or 0, 0)


def _check_migration(migration: MigrationConfig) -> None:
    _positive("--chunk-ms", migration.chunk_ms)
    if migration.chunk_bytes is not None:
        _least("--chunk-bytes", migration.chunk_bytes, 4096)
    _least("--staging-buffers", migration.staging_buffers, 1)
    _least("--max-stages", migration.max_stages, 0)
    _least("--max-bandwidth", migration.max_bandwidth, 0)
    _least("--max-pair-bandwidth", migration.max_pair_bandwidth, 0)
    _least("--max-migrations", migration.max_migrations, 1)
    _least("--max-migration-bytes", migration.max_migration_bytes, 0)
    reply_ms, lease_ms = migration.reply_timeout_ms, migration.lease_ms
    _positive("--reply-timeout-ms", reply_ms)
    longer = f"more than --reply-timeout-ms ({reply_ms})"
    _require(lease_ms > reply_ms, "--lease-ms", lease_ms, longer)
    _require(0 <= migration.pause_spread <= 1, "--pause-spread", migration.pause_spread, "0 to 1")
    _one_of("--transport", migration.transport, TRANSPORTS)
    _require(
        migration.trust_network or migration.transport not in IN_THE_CLEAR,
        "--transport",
        migration.transport,
        "auto, shm, tcp or cuda-ipc, or be given with --trust-network",
    )


def _check_lifecycle(lifecycle: LifecycleConfig, instances: int) -> None:
    most = lifecycle.max_instances
    _require(most >= instances, "--max-instances", most, f"at least --instances ({instances})")
    _least("--max-restarts", lifecycle.max_restarts, 0)
    _least("--drain-deadline", lifecycle.drain_deadline_s, 0)
    _least("--front-ends", lifecycle.front_ends, 1)


def _check_faults(faults: FaultConfig, heartbeat_interval_ms: float) -> None:
    _require(
        faults.heartbeat_timeout_s > heartbeat_interval_ms / 1000,
        "--heartbeat-timeout",
        faults.heartbeat_timeout_s,
        f"more seconds than --heartbeat-interval-ms ({heartbeat_interval_ms:g}) has",
    )
    _positive("--step-timeout", faults.step_timeout_s)
    _least("--failover-timeout", faults.failover_timeout_s, 0)
    _least("--max-crashes", faults.max_crashes, 1)


def _check_unit(unit: UnitConfig, config: ClusterConfig) -> None:
    _least("--unit-guarantee", unit.guarantee, 0)
    _least("--reclaim-patience", unit.patience_s, 0)
    alone = "left out with --ray: a unit is on one host"
    _require(config.ray is None, "--unit", unit.path, alone)
    others = f"left out with --engine {config.engine}: only vLLM's engines share KV cache"
    _require(config.engine == "vllm", "--unit", unit.path, others)


def _check_http(http: HttpConfig) -> None:
    _least("--max-body", http.max_body, 1024)
    _positive("--body-timeout", http.body_timeout_s)
    _least("--max-n", http.max_n, 1)
    _least("--max-prompts", http.max_prompts, 1)
    _least("--max-waiting", http.max_waiting, 0)
    _least("--max-unread", http.max_unread, 0)
    _positive("--send-timeout", http.send_timeout_s)
    _least("--max-media", http.max_media, 1_000_000)
    _one_of("--media-urls", http.media_urls, MEDIA_URLS)
    apart = "left out without --uds: nobody is believed on a port who says whose call it is"
    _require(bool(http.uds) or not http.isolate_users, "--isolate-users", "given", apart)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, flag, value, " or ".join(allowed))


def _least(flag: str, value: float, least: int) -> None:
    _require(value >= least, flag, value, f"{least} or more")


def _positive(flag: str, value: float) -> None:
    _require(value > 0, flag, value, "more than 0")


def _require(holds: bool, flag: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{flag} is {value}, must be {allowed}")
