"""kvmig's own flags; whatever is not one of them is the engine's."""

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
from kvmig.launcher.ray_cluster import AUTO, checked_address, parse_resources

_EPILOG = """Every other flag is the engine's (vLLM's, unless --engine says otherwise) and goes to
each instance, e.g. --host, --port, --max-model-len, --api-key; `--help=all` lists those too."""

_OF_SOME = re.compile(r"(?P<name>i\d+|[^/]+(?=:\s)):\s*(?P<path>.*)")
"""An instance, or a place of a placement, such as "0:1", and its own path."""
_INSTANCE = re.compile(r"i\d+")
SHARES = [str(percent) for percent in range(10, 101, 10)]
FORM = "NAME=PRIORITY[,headroom=TOKENS|,target=MS]"

Config = TypeVar("Config", bound=msgspec.Struct)


def parse(argv: list[str]) -> tuple[ClusterConfig, list[str], str | None]:
    """Returns (checked config, the engine's part of `argv`, what --help asked for).

    Raises ConfigError with the flag, its value and what is allowed.
    """
    flags, rest = parser().parse_known_args(argv)
    config = _filled(
        ClusterConfig,
        flags,
        instance_flags=tuple(flags.instance_flags),
        instance_vllm=tuple(flags.instance_vllm),
        instance_unit=tuple(flags.instance_unit),
        ray=_ray(flags),
        unit=_unit(flags),
        lifecycle=_filled(LifecycleConfig, flags, max_instances=_max_instances(flags)),
        scaling=_scaling(flags),
        priorities=priority_classes(flags.priority_class),
        faults=_filled(FaultConfig, flags),
        http=_filled(
            HttpConfig, flags, max_body=int(flags.max_body), max_media=int(flags.max_media)
        ),
        scheduler=_filled(SchedulerConfig, flags, migration=not flags.no_migration),
        migration=_filled(
            MigrationConfig, flags, max_migration_bytes=int(flags.max_migration_bytes)
        ),
    )
    return check(config), rest, flags.help


def _filled(kind: type[Config], flags: argparse.Namespace, **given: Any) -> Config:
    """Make a config of the flags that have its fields' names. given: its other fields."""
    named = {one: getattr(flags, one) for one in kind.__struct_fields__ if hasattr(flags, one)}
    return kind(**{**named, **given})


def _ray(flags: argparse.Namespace) -> RayConfig | None:
    """None: all instances run on this host. Raises ConfigError."""
    resources = parse_resources(flags.ray_resources)
    if flags.ray is None:
        if resources:
            raise ConfigError(f"--ray-resources is {flags.ray_resources!r}, but --ray is not given")
        return None
    return RayConfig(address=checked_address(flags.ray), resources=resources)


def _shares(text: str) -> tuple[int, int]:
    """Tenths of the device, from percent."""
    words = [one.strip() for one in text.split(",")]
    if len(words) != 2 or any(one not in SHARES for one in words):
        raise argparse.ArgumentTypeError(
            f"{text!r:.100} must be two of {', '.join(SHARES)}, such as 100,40"
        )
    prompts, decodes = (int(one) // 10 for one in words)
    return prompts, decodes


def _unit(flags: argparse.Namespace) -> UnitConfig | None:
    """None: instances have KV cache of their own. Raises ConfigError."""
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
    """None without --autoscale. Raises ConfigError."""
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
        description="Serve MODEL on several vLLM instances; requests move between them live.",
        epilog=_EPILOG,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    root.add_argument(
        "-h", "--help", nargs="?", const="kvmig", metavar="all", default=None, help="this text"
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
    group.add("--engine", "engine", f"what instances are: {', '.join(ENGINES)}")
    group.add(
        "--allow-untested-vllm",
        "allow_untested_vllm",
        "start a vLLM that kvmig wasn't tested with, if it has the names that kvmig uses",
    )
    group.add("--instances", "instances", "instances to start")
    group.add_argument(
        "--instance-flags",
        action="append",
        default=[],
        metavar="'iN: FLAGS'",
        help="the engine's flags that only instance N gets, e.g. 'i1: --tensor-parallel-size 2';"
        " may be given several times",
    )
    group.add_argument(
        "--instance-vllm",
        action="append",
        default=[],
        metavar="'iN: FOLDER'",
        help="another build of vLLM that instance N is, e.g. 'i1: .vllm/0.33.0'; may be given"
        " several times",
    )
    group.add_argument(
        "--instance-unit",
        action="append",
        default=[],
        metavar="'iN: NAME'",
        help="where instance N is in a placement (docs/placement.md); may be given several times",
    )
    group.add(
        "--control-host",
        "control_host",
        "address that control sockets bind to; the cluster's secret is KVMIG_SECRET if set",
    )
    group.add(
        "--heartbeat-interval-ms",
        "heartbeat_interval_ms",
        "longest time between two load reports of an instance, which are its heartbeats",
    )
    group.add("--start-timeout", "start_timeout_s", "seconds for an instance to be ready")
    group.add(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        "seconds that SIGTERM lets running requests finish",
    )


def _add_http(root: FlagParser) -> None:
    usual = HttpConfig()
    group = _Group(root, "HTTP", usual)
    group.add(
        "--max-body",
        "max_body",
        "size of a call's body at most, in MB or with a unit; less where the model can use less",
        type=quantity("MB"),
        default=f"{usual.max_body // 10**6}MB",
        metavar="MB",
    )
    group.add(
        "--body-timeout", "body_timeout_s", "time for a call's body to arrive", metavar="SECONDS"
    )
    group.add("--max-n", "max_n", "answers, or beams, to each prompt of one call", metavar="NUMBER")
    group.add("--max-prompts", "max_prompts", "prompts of one call", metavar="NUMBER")
    group.add(
        "--max-waiting",
        "max_waiting",
        "while so many wait for their first token, further ones of their priority and those"
        " after are answered 429; 0: no limit",
        metavar="REQUESTS",
    )
    group.add(
        "--max-unread",
        "max_unread",
        "a request is failed when its client has not read for more tokens; 0: no limit",
        metavar="TOKENS",
    )
    group.add(
        "--send-timeout",
        "send_timeout_s",
        "a connection is closed when its client has read nothing for so long",
        metavar="SECONDS",
    )
    group.add(
        "--usage-spool",
        "usage_spool",
        "keep the tokens of every call in a file there, until somebody has taken them",
        metavar="FOLDER",
    )
    group.add(
        "--quota-socket",
        "quota_socket",
        "ask there for the tokens of calls whose keys have a quota; needs --usage-spool and --uds",
        metavar="PATH",
    )
    group.add(
        "--isolate-users",
        "isolate_users",
        "keep what is cached of prompts, media and grammars for the user whose call it was of, as a"
        " fleet's proxies name users; needs --uds",
    )
    group.add(
        "--max-media",
        "max_media",
        "size of a call's images, audio and video once decoded, with its body, at most",
        type=quantity("MB"),
        default=f"{usual.max_media // 10**6}MB",
        metavar="MB",
    )
    group.add(
        "--media-urls",
        "media_urls",
        "hosts that images, audio and video are fetched from for clients: any with a public"
        " address; or only those of --allowed-media-domains, if they have one",
        metavar="public|named",
    )
    group.add(
        "--uds",
        "uds",
        "listen on this Unix socket, which only this user can connect to, instead of a port",
        metavar="PATH",
    )


def _add_ray(root: FlagParser) -> None:
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


def _add_unit(root: FlagParser) -> None:
    usual = UnitConfig(path="")
    group = _Group(root, "KV cache that models share", usual)
    group.add_argument(
        "--unit",
        action="append",
        default=[],
        metavar="PATH",
        help="share the KV cache of the unit whose agent, `python -m kvmig.sharing`, listens there;"
        " besides, 'iN: PATH' for an instance that is in another unit, 'NAME: PATH' for those that"
        " are there in a placement (--instance-unit)",
    )
    group.add_argument(
        "--unit-guarantee",
        type=quantity("MiB"),
        default=None,
        metavar="MiB",
        help="KV cache that each instance gets back whenever it wants it, in MiB or with a unit"
        " (None: a fair part of what others weren't promised)",
    )
    group.add_argument(
        "--unit-shares",
        type=_shares,
        default=None,
        metavar="PROMPTS,DECODES",
        help="ask the unit's agent before each step, and take so many percent of the device for one"
        " with prompts and for one of decodes alone, such as 100,40 (None: don't ask)",
    )
    group.add(
        "--reclaim-patience",
        "patience_s",
        "what is called back is waited for so long, while requests end or move elsewhere; then"
        " the last ones are preempted",
        metavar="SECONDS",
    )


def _add_lifecycle(root: FlagParser) -> None:
    group = _Group(root, "instances and front ends", LifecycleConfig())
    group.add_argument(
        "--max-instances",
        type=int,
        default=argparse.SUPPRESS,
        help="instances at once, at most"
        f" (default: {USUAL_MOST}, or --instances where that is more)",
    )
    group.add(
        "--max-restarts",
        "max_restarts",
        "how often in a row an instance is started again that dies soon after",
    )
    group.add(
        "--drain-deadline",
        "drain_deadline_s",
        "what a drain hasn't moved by then goes on elsewhere by recompute",
        metavar="SECONDS",
    )
    group.add("--front-ends", "front_ends", "HTTP processes that share the port")
    group.add(
        "--front-apart",
        "front_apart",
        "give also a single HTTP process a process of its own: it may die, instances stay",
    )
    group.add("--check", "check", "read all flags, say what is wrong with them, and end")
    group.add(
        "--end-with-stdin",
        "end_with_stdin",
        "stop at the end of stdin as at a signal, so that nothing outlives whoever holds it",
    )
    group.add(
        "--heartbeat-descriptor",
        "heartbeat_descriptor",
        "a pipe that gets a byte a second while the server lives; for whoever started it",
        metavar="NUMBER",
    )

    group = _Group(root, "autoscaling", ScalingConfig())
    group.add_argument(
        "--autoscale",
        metavar="X,Y",
        help="keep the mean freeness (KV blocks by which each request can grow) between X and Y,"
        " by adding instances and draining some; the paper: 10,60",
    )
    group.add("--min-instances", "min_instances", "at least so many")
    group.add(
        "--scale-stabilization",
        "stabilization_s",
        "how long freeness must be outside before something is done",
        metavar="SECONDS",
    )
    group.add(
        "--scale-cooldown",
        "cooldown_s",
        "least time from the last change to the next drain",
        metavar="SECONDS",
    )


def _add_scheduler(root: FlagParser) -> None:
    group = _Group(root, "scheduler", SchedulerConfig())
    group.add("--policy", "policy", f"where new requests go and what moves: {', '.join(POLICIES)}")
    group.add_argument(
        "--no-migration",
        action="store_true",
        help="never move a request (the admin API refuses, too)",
    )
    group.add(
        "--inexact-moves",
        "inexact_moves",
        "requests may also move between instances whose logits round differently (other"
        " tensor-parallel sizes, devices, thread counts): their tokens may differ from then on",
    )
    group.add("--scheduler-interval-ms", "interval_ms", "time between two rounds of the scheduler")
    group.add(
        "--migrate-below",
        "source_below",
        "freeness under which an instance gives requests away (None: the policy's own)",
        type=float,
    )
    group.add(
        "--migrate-above",
        "destination_above",
        "freeness over which an instance takes requests in (None: the policy's own)",
        type=float,
    )
    group.add(
        "--min-gain",
        "min_gain",
        "least predicted gain of freeness that makes a move worth it",
        type=float,
    )
    root.add_argument_group("priorities").add_argument(
        "--priority-class",
        action="append",
        default=[],
        metavar=FORM,
        help="a class of requests: a smaller priority runs first (vLLM's number); headroom: tokens"
        " of KV cache kept free beside its requests; target: a decode step in ms that is kept"
        " instead, measured at start; may be given several times; normal=0 is always there",
    )


def _add_faults(root: FlagParser) -> None:
    group = _Group(root, "faults", FaultConfig())
    group.add(
        "--heartbeat-timeout",
        "heartbeat_timeout_s",
        "seconds without a heartbeat from an instance after which its requests run again elsewhere",
    )
    group.add(
        "--step-timeout",
        "step_timeout_s",
        "seconds of one step of an engine after which its requests run again elsewhere;"
        " after twice that it is ended, and started again",
    )
    group.add(
        "--failover-timeout",
        "failover_timeout_s",
        "seconds that requests of a lost instance wait for another one that they can run on",
    )
    group.add(
        "--max-crashes",
        "max_crashes",
        "a request that ran on so many instances as they crashed or hung isn't run again",
    )


def _add_migration(root: FlagParser) -> None:
    group = _Group(root, "migration", MigrationConfig())
    group.add("--transport", "transport", f"how KV blocks travel: {', '.join(TRANSPORTS)}")
    group.add(
        "--trust-network",
        "trust_network",
        "KV blocks may travel unencrypted, and from whoever connects: what"
        f" {', '.join(IN_THE_CLEAR)} do",
    )
    group.add(
        "--chunk-ms",
        "chunk_ms",
        "longest uninterrupted copy of several KV blocks (copies run beside the engine's thread)",
    )
    group.add(
        "--chunk-bytes",
        "chunk_bytes",
        "size of a staging buffer, or one larger KV block (None: 1 MiB, 32 MiB on a GPU)",
        type=int,
    )
    group.add("--staging-buffers", "staging_buffers", "staging buffers an instance")
    group.add(
        "--max-stages",
        "max_stages",
        "live copy stages at most; 0: suspend first, then copy everything",
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
        "KV cache a second out of an instance, in MB or with a unit (1.5GB); 0: no cap",
        type=quantity("MB"),
        metavar="MB/s",
    )
    group.add(
        "--max-pair-bandwidth",
        "max_pair_bandwidth",
        "the same from one instance to another",
        type=quantity("MB"),
        metavar="MB/s",
    )
    group.add(
        "--max-migrations",
        "max_migrations",
        "migrations at once out of an instance, where more wait, and into it",
    )
    group.add(
        "--max-migration-bytes",
        "max_migration_bytes",
        "KV cache on the move at once, each way, in bytes or with a unit; 0: no limit",
        type=quantity("B"),
        metavar="BYTES",
    )
    group.add("--reply-timeout-ms", "reply_timeout_ms", "wait for a peer's answer")
    group.add("--lease-ms", "lease_ms", "silence after which a destination frees a reservation")
