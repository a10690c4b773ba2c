"""kvmig's own flags; every other flag is the engine's."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvmig.core.config import (
    ENGINES,
    IN_THE_CLEAR,
    POLICIES,
    TRANSPORTS,
    USUAL_MOST,
    ClusterConfig,
    FaultConfig,
    HttpConfig,
    LifecycleConfig,
    MigrationConfig,
    RayConfig,
    ScalingConfig,
    SchedulerConfig,
    UnitConfig,
    check,
    instance_number,
)
from kvmig.core.errors import ConfigError
from kvmig.core.flag_parser import FlagParser
from kvmig.core.priorities import PriorityClass, with_normal
from kvmig.core.quantities import quantity
from kvmig.launcher.ray_cluster import AUTO, checked_address
from kvmig.launcher.ray_resources import parse_resources

_EPILOG = """All other flags, such as --host, --port, --max-model-len and --api-key, are passed to
the engine of every instance. `--help=all` lists those flags, too."""

_OF_SOME = re.compile(r"(?P<name>i\d+|[^/]+(?=:\s)):\s*(?P<path>.*)")
"""An instance, or a place of a placement, such as "0:1", and its own path."""
_INSTANCE = re.compile(r"i\d+")
RANKS = ("--data-parallel-size", "--data_parallel_size", "-dp")
"""vLLM's names for a number of engines behind one address."""
API_SERVERS = ("--api-server-count", "--api_server_count", "-asc")
"""vLLM's names for a number of HTTP processes behind one port."""
EXPERTS = frozenset(("--enable-expert-parallel", "--enable_expert_parallel", "-ep"))
SHARES = [str(percent) for percent in range(10, 101, 10)]
FORM = "NAME=PRIORITY[,headroom=TOKENS|,target=MS]"

Config = TypeVar("Config", bound=msgspec.Struct)

PROMPT_MIGRATIONS = 16
"""Default of --max-migrations with --prompt-instances: a migration takes as long as its prompt."""


def parse(argv: list[str]) -> tuple[ClusterConfig, list[str], str | None]:
    """Returns (checked config, the engine's part of `argv`, what --help asked for).

    Raises ConfigError with the flag, its value and what is allowed.
    """
    flags, rest = parser().parse_known_args(argv)
    _refuse_shared_experts(argv, flags.instances)
    config = _filled(
        ClusterConfig,
        flags,
        instance_flags=tuple(flags.instance_flags),
        instance_vllm=tuple(flags.instance_vllm),
        instance_unit=tuple(flags.instance_unit),
        instance_gpus=tuple(flags.instance_gpus),
        instance_node=tuple(flags.instance_node),
        ray=_ray(flags),
        unit=_unit(flags),
        lifecycle=_filled(
            LifecycleConfig,
            flags,
            max_instances=_max_instances(flags),
            gpu_memory=int(flags.gpu_memory),
            instance_gpu_memory=int(flags.instance_gpu_memory),
        ),
        scaling=_scaling(flags),
        priorities=priority_classes(flags.priority_class),
        faults=_filled(FaultConfig, flags),
        http=_filled(
            HttpConfig, flags, max_body=int(flags.max_body), max_media=int(flags.max_media)
        ),
        scheduler=_filled(
            SchedulerConfig,
            flags,
            migration=not flags.no_migration,
            prefix_dispatch=not flags.no_prefix_dispatch,
        ),
        migration=_filled(
            MigrationConfig,
            flags,
            max_migrations=_max_migrations(flags),
            max_migration_bytes=int(flags.max_migration_bytes),
        ),
    )
    return check(config), rest, flags.help


def _refuse_shared_experts(argv: list[str], instances: int) -> None:
    """Refuse ranks that would divide a model's experts among each other. Raises ConfigError."""
    ranks = any(word.startswith(RANKS) for word in argv)
    if ranks and instances > 1 and not EXPERTS.isdisjoint(argv):
        raise ConfigError(
            f"--data-parallel-size is {instances}, must be 1 with --enable-expert-parallel: ranks"
            " that share experts step together, and their requests can't move; --instances"
            f" {instances} starts engines that have all experts each"
        )


def _max_migrations(flags: argparse.Namespace) -> int:
    usual = PROMPT_MIGRATIONS if flags.prompt_instances else MigrationConfig().max_migrations
    given: int = getattr(flags, "max_migrations", usual)
    return given


def _filled(kind: type[Config], flags: argparse.Namespace, **given: Any) -> Config:
    """Make a config of the flags that have its fields' names. given: its other fields."""
    named = {one: getattr(flags, one) for one in kind.__struct_fields__ if hasattr(flags, one)}
    return kind(**{**named, **given})


def _ray(flags: argparse.Namespace) -> RayConfig | None:
    """The Ray cluster; None: all instances run on this host. Raises ConfigError."""
    resources = parse_resources(flags.ray_resources)
    if flags.ray is None:
        if resources:
            raise ConfigError(f"--ray-resources is {flags.ray_resources!r}, but --ray is not given")
        if flags.ray_files:
            raise ConfigError(f"--ray-files is {flags.ray_files!r}, but --ray is not given")
        if flags.ray_fleet:
            raise ConfigError(f"--ray-fleet is {flags.ray_fleet!r}, but --ray is not given")
        return None
    return RayConfig(
        address=checked_address(flags.ray),
        resources=resources,
        files=flags.ray_files,
        fleet=flags.ray_fleet,
    )


def _shares(text: str) -> tuple[int, int]:
    """Tenths of the device, from percent."""
    words = [one.strip() for one in text.split(",")]
    if len(words) != 2 or any(one not in SHARES for one in words):
        raise argparse.ArgumentTypeError(
            f"{text!r:.100} must be two of {', '.join(SHARES)}, such as 100,40"
        )
    prompts, decodes = (int(one) // 10 for one in words)
    return prompts, decodes


def _api_servers(text: str) -> int:
    """vLLM means by 0 what --headless means."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r:.100} must be 1 or more")
    return int(text)


def _unit(flags: argparse.Namespace) -> UnitConfig | None:
    """The unit of the instances; None: they have KV cache of their own. Raises ConfigError."""
    if flags.unit_shares is not None and not flags.unit:
        raise ConfigError("--unit-shares is given, but --unit is not")
    every = [one for one in flags.unit if not _OF_SOME.fullmatch(one)]
    paths: dict[str, str] = {}
    for words in flags.unit:
        if found := _OF_SOME.fullmatch(words):
            name, path = found["name"], found["path"].strip()
            unknown = _INSTANCE.fullmatch(name) and instance_number(name) >= flags.instances
            if unknown or not path:
                raise ConfigError(
                    f"--unit is {words!r}, must name one of {flags.instances} instances, or a unit"
                    " of a placement (--instance-unit), and a path"
                )
            paths[name] = str(Path(path).absolute())
    if not flags.unit and flags.unit_guarantee is not None:
        raise ConfigError(
            f"--unit-guarantee is {flags.unit_guarantee / 2**20:g} MiB, but --unit is not given"
        )
    if not flags.unit:
        return None
    if len(every) != 1 or not every[0]:
        raise ConfigError(
            f"--unit is {every}, must be one path of a unit's socket for all instances"
        )
    return UnitConfig(
        path=str(Path(every[0]).absolute()),
        paths=paths,
        guarantee=int(flags.unit_guarantee or 0),
        patience_s=flags.patience_s,
        shares=flags.unit_shares,
    )


def _max_instances(flags: argparse.Namespace) -> int:
    most: int = getattr(flags, "max_instances", max(USUAL_MOST, flags.instances))
    return most


def _scaling(flags: argparse.Namespace) -> ScalingConfig | None:
    """The limits of --autoscale; None without it. Raises ConfigError."""
    if flags.autoscale is None:
        return None
    try:
        low, high = map(float, flags.autoscale.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--autoscale is {flags.autoscale}, must be x,y with 0 <= x < y"
        ) from error
    most = _max_instances(flags)
    return _filled(ScalingConfig, flags, low=low, high=high, max_instances=most)


def priority_classes(given: list[str]) -> tuple[PriorityClass, ...]:
    """The configured classes, first to run first. Raises ConfigError."""
    return with_normal([parse_class(words) for words in given])


def parse_class(words: str) -> PriorityClass:
    """Example: "high=-1,headroom=1600". Raises ConfigError."""
    (name, number), *options = (word.partition("=")[::2] for word in words.split(","))
    given = dict(options)
    try:
        if len(given) < len(options) or not given.keys() <= {"headroom", "target"}:
            raise ValueError(options)
        found = PriorityClass(
            name.strip(),
            int(number),
            headroom_tokens=int(given.get("headroom", 0)),
            target_ms=float(given.get("target", 0)),
        )
    except ValueError as error:
        raise ConfigError(f"--priority-class is {words!r}, must be {FORM}") from error
    if "target" in given and not found.target_ms > 0:
        raise ConfigError(
            f"--priority-class {found.name}: target is {found.target_ms:g}, must be more than 0"
        )
    return found


class _Group:
    """A group of flags that fill the fields of one config."""

    def __init__(self, root: FlagParser, title: str, usual: msgspec.Struct) -> None:
        """usual: has the defaults."""
        self._usual = usual
        self.add_argument = root.add_argument_group(title).add_argument

    def add(self, flag: str, field: str, text: str, **how: Any) -> None:
        """Let `flag` fill `field`, with its default and of its type unless `how` says otherwise."""
        usual = getattr(self._usual, field)
        if isinstance(usual, bool):
            self.add_argument(flag, dest=field, action="store_true", help=text)
            return
        metavar = flag.removeprefix("--").replace("-", "_").upper()
        how = {"default": usual, "type": type(usual), "metavar": metavar, **how}
        self.add_argument(flag, dest=field, help=text, **how)


def parser() -> argparse.ArgumentParser:
    """The parser of kvmig's own flags, in groups."""
    root = FlagParser(
        prog="python -m kvmig.serve",
        usage="python -m kvmig.serve MODEL [kvmig's flags] [any flag of vllm serve]",
        description="Serve MODEL on several vLLM instances behind one OpenAI API, and move running"
        " requests between the instances.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    root.add_argument(
        "-h", "--help", nargs="?", const="kvmig", metavar="all", default=None, help="show this help"
    )
    _add_cluster(root)
    _add_http(root)
    _add_ray(root)
    _add_unit(root)
    _add_lifecycle(root)
    _add_scheduler(root)
    _add_faults(root)
    _add_migration(root)
    return root


def _add_cluster(root: FlagParser) -> None:
    group = _Group(root, "cluster", ClusterConfig())
    group.add("--engine", "engine", f"engine of the instances: {', '.join(ENGINES)}")
    group.add(
        "--allow-untested-vllm",
        "allow_untested_vllm",
        "allow a vLLM version that kvmig was not tested with, if it has the internals that kvmig"
        " uses",
    )
    group.add(
        "--load",
        "load",
        "auto: read weights by the --load-format that is measured to be the fastest on this host,"
        " once for a model",
        metavar="HOW",
    )
    group.add_argument(
        "--instances",
        type=int,
        default=ClusterConfig().instances,
        help="number of instances to start",
    )
    group.add_argument(
        *RANKS,
        dest="instances",
        type=int,
        default=argparse.SUPPRESS,
        metavar="INSTANCES",
        help="the same by vLLM's name: each data parallel rank is an instance with the whole model",
    )
    group.add_argument(
        "--instance-flags",
        action="append",
        default=[],
        metavar="'iN: FLAGS'",
        help="engine flags for instance N only, e.g. 'i1: --tensor-parallel-size 2';"
        " may be given several times",
    )
    group.add_argument(
        "--instance-vllm",
        action="append",
        default=[],
        metavar="'iN: FOLDER'",
        help="folder of another vLLM for instance N, e.g. 'i1: .vllm/0.33.0'; may be given several"
        " times",
    )
    group.add_argument(
        "--instance-unit",
        action="append",
        default=[],
        metavar="'iN: NAME'",
        help="unit of instance N in a placement (docs/placement.md); may be given several times",
    )
    group.add_argument(
        "--instance-gpus",
        action="append",
        default=[],
        metavar="'iN: ID,ID'",
        help="GPUs of instance N, one per worker, e.g. 'i1: 2,3'; may be given several times"
        " (default: the launcher chooses)",
    )
    group.add(
        "--control-host",
        "control_host",
        "address that control sockets bind to; they are authenticated by KVMIG_SECRET, or by a"
        " random secret if that is not set",
    )
    group.add(
        "--heartbeat-interval-ms",
        "heartbeat_interval_ms",
        "maximum time between two load reports of an instance, which serve as its heartbeats",
    )
    group.add(
        "--start-timeout", "start_timeout_s", "seconds that an instance may take to become ready"
    )
    group.add(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        "seconds that running requests get to finish after SIGTERM",
    )


def _add_http(root: FlagParser) -> None:
    usual = HttpConfig()
    group = _Group(root, "HTTP", usual)
    group.add(
        "--max-body",
        "max_body",
        "maximum size of a request body, in MB or with a unit; lower if the model cannot use that"
        " much",
        type=quantity("MB"),
        default=f"{usual.max_body // 10**6}MB",
        metavar="MB",
    )
    group.add(
        "--body-timeout", "body_timeout_s", "time for a request body to arrive", metavar="SECONDS"
    )
    group.add("--max-n", "max_n", "maximum answers, or beams, per prompt", metavar="NUMBER")
    group.add("--max-prompts", "max_prompts", "maximum prompts per request", metavar="NUMBER")
    group.add(
        "--max-waiting",
        "max_waiting",
        "maximum requests that wait for their first token; above it, further requests of the same"
        " or a lower priority are answered with 429; 0: no limit",
        metavar="REQUESTS",
    )
    group.add(
        "--max-unread",
        "max_unread",
        "maximum tokens of a request that its client has not read; above it the request fails;"
        " 0: no limit",
        metavar="TOKENS",
    )
    group.add(
        "--send-timeout",
        "send_timeout_s",
        "time without a read by the client after which its connection is closed",
        metavar="SECONDS",
    )
    group.add(
        "--usage-spool",
        "usage_spool",
        "folder for the usage records of calls, which are kept until a reader has taken them",
        metavar="FOLDER",
    )
    group.add(
        "--quota-socket",
        "quota_socket",
        "Unix socket that grants tokens to calls whose keys have a quota; requires --usage-spool"
        " and --uds",
        metavar="PATH",
    )
    group.add(
        "--isolate-users",
        "isolate_users",
        "do not share cached prompts, media and grammars between the users that a fleet's proxies"
        " name; requires --uds",
    )
    group.add(
        "--max-media",
        "max_media",
        "maximum size of a request body plus its decoded images, audio and video, in MB or with a"
        " unit",
        type=quantity("MB"),
        default=f"{usual.max_media // 10**6}MB",
        metavar="MB",
    )
    group.add(
        "--media-urls",
        "media_urls",
        "hosts from which images, audio and video may be fetched: public: any host with a public"
        " address; named: only hosts of --allowed-media-domains, at public addresses",
        metavar="public|named",
    )
    group.add(
        "--uds",
        "uds",
        "listen on this Unix socket instead of a port; only the same user can connect",
        metavar="PATH",
    )


def _add_ray(root: FlagParser) -> None:
    group = root.add_argument_group("several hosts")
    group.add_argument(
        "--ray",
        nargs="?",
        const=AUTO,
        default=None,
        metavar="ADDRESS",
        help="run the instances on the nodes of the Ray cluster whose head is at HOST:PORT; without"
        " an address, of the cluster that this host belongs to",
    )
    group.add_argument(
        "--ray-resources",
        default="",
        metavar="JSON",
        help="Ray resources of each instance, such as '{\"CPU\": 4}' (default: one GPU per worker)",
    )
    group.add_argument(
        "--ray-files",
        default="",
        metavar="FOLDER",
        help="folder of a fleet's downloaded models: MODEL in it is in the folder KVMIG_FILES on"
        " nodes that set this variable (default: MODEL has the same path on each node)",
    )
    group.add_argument(
        "--ray-fleet",
        default="",
        metavar="WORD",
        help="word of the fleet whose agents on the nodes have units and fork servers for the"
        " instances (default: there are none)",
    )
    group.add_argument(
        "--instance-node",
        action="append",
        default=[],
        metavar="'iN: ID'",
        help="id of the Ray node that instance N runs on; may be given several times (default: Ray"
        " chooses)",
    )


def _add_unit(root: FlagParser) -> None:
    usual = UnitConfig(path="")
    group = _Group(root, "KV cache shared by models", usual)
    group.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="PATH",
        help="Unix socket of a unit's agent (`python -m kvmig.sharing`), whose KV cache the"
        " instances share; in addition, 'iN: PATH' for an instance in another unit, and"
        " 'NAME: PATH' for the instances of that unit in a placement (--instance-unit)",
    )
    group.add_argument(
        "--unit-guarantee",
        type=quantity("MiB"),
        default=None,
        metavar="MiB",
        help="KV cache that is reserved for each instance, in MiB or with a unit (None: a fair"
        " share of what is not reserved for others)",
    )
    group.add_argument(
        "--unit-shares",
        type=_shares,
        default=None,
        metavar="PROMPTS,DECODES",
        help="ask the unit's agent before each step, and use these percentages of the device for"
        " steps with prompts and for steps with decodes only, such as 100,40 (None: do not ask)",
    )
    group.add(
        "--reclaim-patience",
        "patience_s",
        "time that reclaimed KV cache may take to become free as requests end or move away; after"
        " it the latest requests are preempted",
        metavar="SECONDS",
    )


def _add_lifecycle(root: FlagParser) -> None:
    group = _Group(root, "instances and front ends", LifecycleConfig())
    group.add_argument(
        "--max-instances",
        type=int,
        default=argparse.SUPPRESS,
        help="maximum number of instances"
        f" (default: {USUAL_MOST}, or --instances where that is more)",
    )
    group.add(
        "--gpu-memory",
        "gpu_memory",
        "maximum memory of each GPU that all instances take together, in bytes or with a unit"
        " (40GiB); 0: what is free at the start",
        type=quantity("B"),
        metavar="BYTES",
    )
    group.add(
        "--instance-gpu-memory",
        "instance_gpu_memory",
        "memory that each instance takes of each of its GPUs, in bytes or with a unit (20GiB); 0:"
        " an equal part of what is free",
        type=quantity("B"),
        metavar="BYTES",
    )
    group.add(
        "--mps",
        "mps",
        "start an MPS daemon, which ends with the server, so that instances on one GPU compute at"
        " the same time",
    )
    group.add(
        "--max-restarts",
        "max_restarts",
        "maximum consecutive restarts of an instance that dies soon after its start",
    )
    group.add(
        "--drain-deadline",
        "drain_deadline_s",
        "time for a drain; requests that have not moved by then are recomputed on other instances",
        metavar="SECONDS",
    )
    group.add(
        "--front-ends",
        "front_ends",
        "number of HTTP processes that share the port; 0: as many as there are cores for where"
        " there are GPUs, else 1",
    )
    group.add_argument(
        *API_SERVERS,
        dest="front_ends",
        type=_api_servers,
        default=argparse.SUPPRESS,
        metavar="FRONT_ENDS",
        help="the same by vLLM's name, 1 or more",
    )
    group.add(
        "--front-apart",
        "front_apart",
        "run the HTTP server in a process of its own, even a single one, so that the instances"
        " survive its death",
    )
    group.add("--check", "check", "check all flags, report errors, and exit")
    group.add(
        "--sizes",
        "sizes",
        "with --check: also print what the model takes of memory, as one line of JSON",
    )
    group.add(
        "--end-with-stdin",
        "end_with_stdin",
        "shut down at the end of stdin, as at a signal, so that the server ends with its parent",
    )
    group.add(
        "--heartbeat-descriptor",
        "heartbeat_descriptor",
        "file descriptor of a pipe to write one byte per second to, for the parent's health check",
        metavar="NUMBER",
    )

    group = _Group(root, "autoscaling", ScalingConfig())
    group.add_argument(
        "--autoscale",
        metavar="X,Y",
        help="add and drain instances to keep the mean freeness (KV blocks by which each request"
        " can grow) between X and Y; 10,60 in the Llumnix paper",
    )
    group.add("--min-instances", "min_instances", "minimum number of instances")
    group.add(
        "--scale-stabilization",
        "stabilization_s",
        "time that the freeness must be out of range before instances are added or drained",
        metavar="SECONDS",
    )
    group.add(
        "--scale-cooldown",
        "cooldown_s",
        "minimum time from the last change to the next drain",
        metavar="SECONDS",
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _add_scheduler(root: FlagParser) -> None:
    group = _Group(root, "scheduler", SchedulerConfig())
    group.add("--policy", "policy", f"policy for dispatch and migration: {', '.join(POLICIES)}")
    group.add_argument(
        "--no-migration",
        action="store_true",
        help="never move a request; the admin API refuses to, as well",
    )
    group.add_argument(
        "--no-prefix-dispatch",
        action="store_true",
        help="dispatch a request without regard to where the KV of its prompt's beginning is",
    )
    group.add(
        "--prompt-instances",
        "prompt_instances",
        "instances that compute the prompts of new requests, as i0,i1; the others decode them"
        " (default: none)",
        type=_names,
        metavar="NAMES",
    )
    group.add(
        "--inexact-moves",
        "inexact_moves",
        "allow moves between instances whose logits round differently (other tensor-parallel"
        " sizes, devices, thread counts); later tokens of a moved request may then differ",
    )
    group.add("--scheduler-interval-ms", "interval_ms", "time between two rounds of the scheduler")
    group.add(
        "--migrate-below",
        "source_below",
        "freeness below which requests move away from an instance (None: the policy's default)",
        type=float,
    )
    group.add(
        "--migrate-above",
        "destination_above",
        "freeness above which requests may move to an instance (None: the policy's default)",
        type=float,
    )
    group.add(
        "--min-gain",
        "min_gain",
        "minimum predicted gain of freeness for a move (None: the policy's default)",
        type=float,
    )
    root.add_argument_group("priorities").add_argument(
        "--priority-class",
        action="append",
        default=[],
        metavar=FORM,
        help="priority class of requests; a smaller priority runs first, as in vLLM; headroom:"
        " tokens of KV cache to keep free on instances with such requests; target: decode step time"
        " in ms to keep, from which the headroom is measured at start; may be given several times;"
        " normal=0 always exists",
    )


def _add_faults(root: FlagParser) -> None:
    group = _Group(root, "faults", FaultConfig())
    group.add(
        "--heartbeat-timeout",
        "heartbeat_timeout_s",
        "seconds without a heartbeat from an instance after which its requests are recomputed on"
        " others",
    )
    group.add(
        "--step-timeout",
        "step_timeout_s",
        "seconds in one engine step after which the requests of the instance are recomputed on"
        " others; after twice that time the instance is killed and restarted",
    )
    group.add(
        "--failover-timeout",
        "failover_timeout_s",
        "seconds that requests of a lost instance wait for another instance",
    )
    group.add(
        "--max-crashes",
        "max_crashes",
        "number of instances that may crash or hang under a request before it fails",
    )


def _add_migration(root: FlagParser) -> None:
    group = _Group(root, "migration", MigrationConfig())
    group.add(
        "--mixed-shapes",
        "mixed_shapes",
        "let instances that are added later have another --tensor-parallel-size or --block-size:"
        " instances exchange blocks of a common size",
    )
    group.add("--transport", "transport", f"transport of KV blocks: {', '.join(TRANSPORTS)}")
    group.add(
        "--trust-network",
        "trust_network",
        f"allow transports without encryption and authentication: {', '.join(IN_THE_CLEAR)}",
    )
    group.add(
        "--chunk-ms",
        "chunk_ms",
        "maximum duration of one copy of several KV blocks; copies do not run on the engine's"
        " thread",
    )
    group.add(
        "--chunk-bytes",
        "chunk_bytes",
        "size of a staging buffer, at least one KV block (None: 1 MiB, on a GPU 32 MiB)",
        type=int,
    )
    group.add("--staging-buffers", "staging_buffers", "number of staging buffers per instance")
    group.add(
        "--max-stages",
        "max_stages",
        "maximum copy stages while the request runs; 0: suspend it first, then copy everything",
    )
    group.add(
        "--pause-spread",
        "pause_spread",
        "delay the last tokens before a migration's pause by growing amounts, this fraction of a"
        " step each, so that the client sees several short delays instead of one; 0: off",
    )
    group.add(
        "--max-bandwidth",
        "max_bandwidth",
        "maximum KV cache per second out of an instance, in MB or with a unit (1.5GB); 0: no limit",
        type=quantity("MB"),
        metavar="MB/s",
    )
    group.add(
        "--max-pair-bandwidth",
        "max_pair_bandwidth",
        "the same, from one instance to one other",
        type=quantity("MB"),
        metavar="MB/s",
    )
    group.add(
        "--max-migrations",
        "max_migrations",
        "maximum concurrent migrations out of an instance, and into it; further ones wait (default:"
        f" {MigrationConfig().max_migrations}, with --prompt-instances {PROMPT_MIGRATIONS})",
        type=int,
        default=argparse.SUPPRESS,
    )
    group.add(
        "--max-migration-bytes",
        "max_migration_bytes",
        "maximum KV cache in transfer out of an instance, and into it, in bytes or with a unit; 0:"
        " no limit",
        type=quantity("B"),
        metavar="BYTES",
    )
    group.add("--reply-timeout-ms", "reply_timeout_ms", "maximum wait for the answer of a peer")
    group.add(
        "--lease-ms",
        "lease_ms",
        "silence of the source after which a destination frees its reservation",
    )
