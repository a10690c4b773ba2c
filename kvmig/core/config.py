"""The configuration of a cluster: frozen, checked before anything starts, sent to every process."""

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
Transport = Literal["auto", "shm", "tcp", "cuda-ipc", "nixl", "nccl"]
POLICIES: tuple[str, ...] = get_args(PolicyName)
ENGINES: tuple[str, ...] = get_args(EngineName)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
LOADS = ("auto",)
"""Values of --load; empty: as the engine's own flags say."""
IN_THE_CLEAR = ("nixl", "nccl")
"""Transports with sockets of their own, which neither encrypt nor authenticate."""
BY_NAME = ("nccl",)
"""Transports that `auto` never takes."""


USUAL_MOST = 16
"""Maximum number of instances, unless --max-instances or --instances is larger."""
HEAD_BYTES = 1 << 16
"""Maximum size of a call's first line and headers."""
HEAD_S = 20.0
"""Maximum time for the headers to arrive, from the start of the connection."""
KEEP_ALIVE_S = 75
"""How long an idle connection stays open for the next call. Longer than clients and proxies keep
idle connections (httpx, and so openai, 5 s; aiohttp 15 s; nginx and most load balancers 60 s): the
client must close first, or a call may arrive while the server closes the connection, which HTTP/1.1
cannot distinguish from a failure."""
SPARE_FILES = 500
"""Files that a process keeps for other uses than clients, at most a quarter of its limit."""
BODIES = 8
"""How many bodies of the maximum size one front end may be receiving at a time."""
SEND_BYTES = 1 << 17
"""Bytes of an answer that the kernel buffers for a client that does not read (it doubles them)."""


class MigrationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a request moves. Times in milliseconds, sizes in bytes."""

    chunk_ms: float = 2.0
    """Maximum duration of one copy; a copy has at least one KV block."""
    chunk_bytes: int | None = None
    """Size of a staging buffer; at least one KV block. None: 1 MiB, or 32 MiB where the KV cache
    is on a GPU."""
    staging_buffers: int = 4
    """Number of staging buffers per instance; bounds memory and data in transfer."""
    max_stages: int = 8
    """Maximum copy stages while the request runs; 0: everything is copied in the pause."""
    pause_spread: float = 0.1
    """The front end delays the last tokens before a pause by growing amounts, this fraction of a
    step each, so that the client sees several short delays instead of one; 0: off."""
    unit_tokens: int = 0
    """Size in tokens of the sub-blocks that instances with different layouts exchange; 0: all
    layouts are equal and instances exchange blocks."""
    mixed_shapes: bool = False
    """Whether instances that come later may have another block size or number of workers."""
    transport: Transport = "auto"
    trust_network: bool = False
    """Whether transports without encryption and authentication are allowed."""
    max_bandwidth: float = 0.0
    """Maximum KV cache per second out of an instance, in bytes; 0: no limit."""
    max_pair_bandwidth: float = 0.0
    """Maximum KV cache per second from one instance to one other, in bytes; 0: no limit."""
    max_migrations: int = 4
    """Maximum concurrent migrations out of an instance, and into it."""
    max_migration_bytes: int = 0
    """Maximum KV cache in transfer out of an instance, and into it, in bytes; 0: no limit."""
    reply_timeout_ms: float = 2000.0
    """Maximum wait for a peer's answer, after which the migration is aborted."""
    lease_ms: float = 10000.0
    """Silence of the source after which a destination frees its reservation."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The global scheduler: dispatch and migration.

    Freeness is in KV blocks per request, see `kvmig.controlplane.freeness`; None: the policy's
    default.
    """

    policy: PolicyName = "kvmig"
    migration: bool = True
    interval_ms: float = 200.0
    prefix_dispatch: bool = True
    """Whether a new request had better go where the KV of its prompt's beginning is."""
    prompt_instances: tuple[str, ...] = ()
    """Instances that compute the prompts of new requests; the others decode them."""
    inexact_moves: bool = False
    """Whether policies may move requests between numerics classes, where tokens may differ."""
    source_below: float | None = None
    """Freeness below which requests move away from an instance."""
    destination_above: float | None = None
    """Freeness above which requests may move to an instance."""
    min_gain: float | None = None
    """Minimum predicted gain of the lower freeness of two instances for a move."""


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Detection of failed instances, and what follows. Times in seconds."""

    heartbeat_timeout_s: float = 1.5
    """Time without a heartbeat after which an instance's requests are recomputed on others."""
    step_timeout_s: float = 60.0
    """Time in one engine step after which the instance's requests are recomputed on others; after
    twice that time the instance is killed and restarted."""
    failover_timeout_s: float = 120.0
    """How long a request of a lost instance waits for another instance."""
    max_crashes: int = 2
    """Number of instances that may crash or hang under a request before it fails."""


MediaUrls = Literal["public", "named"]
"""public: any host with a public address, and hosts that are named, at any address.
named: only hosts that are named, at public addresses."""
MEDIA_URLS: tuple[str, ...] = get_args(MediaUrls)


class CertificateFiles(msgspec.Struct, frozen=True):
    """The files of a port's certificate."""

    cert: str
    """File of the certificate, with those of its issuers after it; in PEM form."""
    key: str
    """File of its private key, without a password; in PEM form."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of HTTP calls."""

    max_body: int = 64_000_000
    """Maximum size of a body, in bytes."""
    body_timeout_s: float = 60.0
    """Time for a body to arrive."""
    max_n: int = 16
    """Maximum answers, or beams, per prompt."""
    max_prompts: int = 256
    """Maximum prompts per call."""
    max_waiting: int = 10_000
    """Maximum requests of all front ends that wait for their first token; 0: no limit."""
    max_unread: int = 8192
    """Maximum tokens of a request that its client has not read; 0: no limit."""
    send_timeout_s: float = 300.0
    """Time without a read by the client after which its connection is closed."""
    usage_spool: str = ""
    """Folder for the usage records of calls; empty: none are kept."""
    quota_socket: str = ""
    """Path of the Unix socket that grants tokens to calls whose keys have a quota; empty: there
    are no quotas."""
    isolate_users: bool = False
    """Whether cached prompts, media and grammars are kept separate for each user."""
    max_media: int = 100_000_000
    """Maximum size of a call's body plus its decoded images, audio and video, in bytes."""
    media_urls: MediaUrls = "public"
    """Hosts from which images, audio and video may be fetched for clients."""
    uds: str = ""
    """Path of the Unix socket to listen on instead of a port; empty: listen on the port."""


class LifecycleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start and end of instances and front ends. Times in seconds."""

    max_instances: int = USUAL_MOST
    """Maximum number of instances, including those that start or drain."""
    gpu_memory: int = 0
    """Bytes of each GPU that all instances may take together; 0: all that is free at the start."""
    instance_gpu_memory: int = 0
    """Bytes that an instance takes of each of its GPUs, small or large; 0: an equal part of what is
    free."""
    mps: bool = False
    """Whether to start an MPS daemon, so that instances on one GPU compute at the same time."""
    max_restarts: int = 5
    """Maximum consecutive restarts of an instance that dies soon after its start."""
    drain_deadline_s: float = 300.0
    """Time for a drain; requests that have not moved by then are recomputed on other instances."""
    front_ends: int = 0
    """Number of HTTP processes that share the port; 0: as many as there are cores for, without
    those of the GPUs, and one on a host without GPUs or where the engine keeps something in one."""
    front_apart: bool = False
    """Whether a single front end has a process of its own, too, so that instances survive its
    death."""
    check: bool = False
    """Whether to check all flags and exit."""
    sizes: bool = False
    """Whether such a check also prints what the model takes of memory."""
    end_with_stdin: bool = False
    """Whether to shut down at the end of stdin, as at a signal."""
    heartbeat_descriptor: int = -1
    """File descriptor of a pipe that gets a byte every second while the event loop runs, or -1."""


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keep the mean freeness within [low, high] (Llumnix, section 4.4.3). Times in seconds."""

    low: float = 10.0
    """KV blocks per request; below it for `stabilization_s`, instances are added."""
    high: float = 60.0
    """KV blocks per request; above it for `stabilization_s`, an instance is drained."""
    min_instances: int = 1
    max_instances: int = 16
    stabilization_s: float = 5.0
    cooldown_s: float = 30.0
    """Minimum time from the last start or end of an instance to the next drain."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster whose nodes run the instances."""

    address: str = "auto"
    """HOST:PORT of the cluster's head, or auto: the cluster that this host belongs to."""
    resources: dict[str, float] = {}
    """Ray resources of each instance; empty: one GPU per worker."""
    files: str = ""
    """A fleet's folder of models' files, which a node may have elsewhere; empty: MODEL has the same
    path on each node."""
    fleet: str = ""
    """The word of the fleet, whose agents on nodes have units and fork servers; empty: it is
    none."""


class UnitConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The unit whose KV cache the instances share with the instances of other models."""

    path: str
    """Path of the agent's Unix socket."""
    paths: dict[str, str] = {}
    """Paths for instances in other units, by the name of the instance or of its unit in a
    placement."""
    guarantee: int = 0
    """Bytes of KV cache that are reserved for an instance; 0: a fair share."""
    patience_s: float = 2.0
    """Time for reclaimed KV cache to become free before requests are preempted for it."""
    shares: tuple[int, int] | None = None
    """Tenths of the device for steps with prompts and for steps with decodes only. None: steps do
    not wait for other models' steps."""
    model: str = ""
    """The model's name in the unit."""

    def config_for(self, instance: str, place: str, decode_parts: int = 0) -> UnitConfig:
        """Return the config of one instance. place: its unit in a placement. decode_parts: tenths
        of the device for its steps with decodes only; 0: those of all."""
        path = self.paths.get(instance) or self.paths.get(place, self.path)
        shares = self.shares
        if shares is not None and decode_parts:
            shares = shares[0], decode_parts
        return msgspec.structs.replace(self, path=path, paths={}, shares=shares)


JOIN = "KVMIG_JOIN"
"""Environment variable: where the scheduler of several servers listens."""


class JoinConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler that several servers have in common."""

    scheduler: str
    """Endpoint of its socket."""
    server: str
    """Name of this server among those that join it: its instances' names begin with it."""


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all processes of a cluster share."""

    engine: EngineName = "vllm"
    """Engine of all instances."""
    allow_untested_vllm: bool = False
    load: str = ""
    """auto: the --load-format is chosen by measuring; empty: it is as the engine's flags say."""
    instances: int = 2
    instance_flags: tuple[str, ...] = ()
    """Engine flags for single instances, each as "iN: FLAGS"."""
    instance_vllm: tuple[str, ...] = ()
    """Folders of another vLLM for single instances, each as "iN: FOLDER"."""
    instance_unit: tuple[str, ...] = ()
    """Units of instances in a placement, each as "iN: NAME"."""
    instance_gpus: tuple[str, ...] = ()
    """GPUs of instances, each as "iN: ID,ID" with one per worker; those of the others are
    chosen by the launcher."""
    instance_node: tuple[str, ...] = ()
    """Ids of the Ray nodes of instances, each as "iN: ID"; Ray chooses the others'."""
    ray: RayConfig | None = None
    """Ray's settings; None: all instances run on this host."""
    control_host: str = "127.0.0.1"
    """Address that llumlets and scheduler bind their sockets to."""
    heartbeat_interval_ms: float = 50.0
    """Maximum time between two load reports of an instance."""
    start_timeout_s: float = 600.0
    shutdown_timeout_s: float = 30.0
    """How long running requests get to finish after SIGTERM."""
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
    join: JoinConfig | None = None
    """The scheduler of several servers; None: the server is alone."""

    def public_name(self, instance: str) -> str:
        """Name the instance outside of its launcher. Example: i0, or 3fa01b7c-i0 of a server that
        has joined others."""
        return instance if self.join is None else f"{self.join.server}-{instance}"

    def own_name(self, public: str) -> str:
        """Invert `public_name`; the name of another server's instance stays as it is."""
        return public if self.join is None else public.removeprefix(f"{self.join.server}-")


def instance_name(number: int) -> str:
    """Name instance `number`, from 0."""
    return f"i{number}"


def instance_number(name: str) -> int:
    """Invert `instance_name`, or `ClusterConfig.public_name` of it; the number is below
    `LifecycleConfig.max_instances`."""
    return int(name.rpartition("-")[2].removeprefix("i"))


def check(config: ClusterConfig) -> ClusterConfig:
    """Refuse values that can't work, by name; returns `config` unchanged.

    Raises ConfigError with the flag, its value and what is allowed.
    """
    _one_of("--engine", config.engine, ENGINES)
    _check_load(config)
    _least("--instances", config.instances, 1)
    _positive("--heartbeat-interval-ms", config.heartbeat_interval_ms)
    _least("--shutdown-timeout", config.shutdown_timeout_s, 0)
    _positive("--start-timeout", config.start_timeout_s)
    _check_scheduler(config.scheduler)
    _check_prompts(config)
    _check_migration(config.migration)
    _check_lifecycle(config.lifecycle, config.instances)
    check_classes(config.priorities)
    if config.scaling is not None:
        check_scaling(config.scaling, config.instances)
    _check_faults(config.faults, config.heartbeat_interval_ms)
    _check_http(config.http)
    if config.unit is not None:
        _check_unit(config.unit, config)
    nodes = ", ".join(config.instance_node)
    _require(config.ray is not None or not nodes, "--instance-node", nodes, "given with --ray")
    if config.ray is not None:
        _check_ray(config)
    if config.join is not None:
        _check_join(config)
    return config


def _check_load(config: ClusterConfig) -> None:
    if not config.load:
        return
    _one_of("--load", config.load, LOADS)
    other = f"left out with --engine {config.engine}: vLLM has several ways to read weights"
    _require(config.engine == "vllm", "--load", config.load, other)
    elsewhere = "left out with --ray: what is fastest is measured on this host"
    _require(config.ray is None, "--load", config.load, elsewhere)


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


def _check_prompts(config: ClusterConfig) -> None:
    names, scheduler = config.scheduler.prompt_instances, config.scheduler
    given = ",".join(names)
    known = {instance_name(number) for number in range(config.lifecycle.max_instances)}
    usual = ", ".join(instance_name(number) for number in range(2))
    _require(
        known.issuperset(names),
        "--prompt-instances",
        given,
        f"names of instances, such as {usual}, with commas; --max-instances is {len(known)}",
    )
    started = {instance_name(number) for number in range(config.instances)}
    _require(
        not names or not started.issubset(names),
        "--prompt-instances",
        given,
        f"fewer than all instances (--instances {config.instances}): the others decode",
    )
    moves = scheduler.migration or not names
    _require(moves, "--prompt-instances", given, "left out with --no-migration")


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
    _least("--gpu-memory", lifecycle.gpu_memory, 0)
    _least("--instance-gpu-memory", lifecycle.instance_gpu_memory, 0)
    _least("--max-restarts", lifecycle.max_restarts, 0)
    _least("--drain-deadline", lifecycle.drain_deadline_s, 0)
    _least("--front-ends", lifecycle.front_ends, 0)


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
    alone = "left out with --ray: only `kvmig up --ray` starts agents of units on nodes"
    _require(config.ray is None or bool(config.ray.fleet), "--unit", unit.path, alone)
    others = f"left out with --engine {config.engine}: only vLLM's engines share KV cache"
    _require(config.engine == "vllm", "--unit", unit.path, others)


def _check_ray(config: ClusterConfig) -> None:
    chosen = "left out with --ray: Ray chooses the GPUs (--ray-resources)"
    taken = config.ray is not None and bool(config.ray.files)  # by the fleet's agents on nodes
    gpus = config.instance_gpus
    _require(taken or not gpus, "--instance-gpus", ", ".join(gpus), chosen)
    limit = config.lifecycle.gpu_memory
    _require(not limit, "--gpu-memory", limit, "left out with --ray: a part of a GPU is its limit")


def _check_join(config: ClusterConfig) -> None:
    alone = f"left out with {JOIN}"
    ray = config.ray and config.ray.address
    _require(config.ray is None, "--ray", ray, f"{alone}: Ray places instances of one server")
    unit = config.unit and config.unit.path
    _require(config.unit is None, "--unit", unit, f"{alone}: a unit has launchers of its own")
    scaling = config.scaling and f"{config.scaling.low:g},{config.scaling.high:g}"
    scaled = f"{alone}: who starts servers scales them"
    _require(config.scaling is None, "--autoscale", scaling, scaled)
    _require(config.scheduler.migration, "--no-migration", "given", alone)


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
    apart = "left out without --uds: on a port any client could name another user as its own"
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
