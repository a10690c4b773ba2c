"""What a fleet's user says of a model: the specification, and the file with all of them. Pure.

An error names the field, its value and what is allowed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import yaml

from kvmig.command.launch import HANG_S, HEALTH
from kvmig.command.server_environment import check_named
from kvmig.command.template import check_template
from kvmig.core.errors import ConfigError
from kvmig.core.read_progress import note_path
from kvmig.fleet.schedule import ScheduledFloor, parse_cron, zone_of
from kvmig.sources.source import parse_source

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
NAMES = (
    "letters, digits and . _ : / -, at most 128, the first a letter or a digit, without '..', an"
    " empty part or a part v1 between slashes"
)
RESERVED_PARTS = {"", ".", "v1"}
"""Refused parts of a name, between slashes: in paths as /models/NAME/v1/... they end the name."""
RESERVED_ENDS = ("/logs", "/rollout", "/scale", "/switch", "/wake")
"""Ends of a name that are refused: orders to a model have paths as /kvmig/v2/models/NAME/wake."""
PATH = "path:"
LATER = {
    "cpu_offload": "weights in the host's memory",
}
"""Fields that have their place and no meaning yet."""
OURS = {
    "--uds": "the fleet's own",
    "--isolate-users": "share_prefixes",
    "--no-share-prefixes": "share_prefixes",
    "--port": "of `kvmig up`",
    "--host": "of `kvmig up`",
    "--allowed-origins": "of `kvmig up`",
    "--allowed-methods": "of `kvmig up --allowed-origins`",
    "--allowed-headers": "of `kvmig up --allowed-origins`",
    "--allow-credentials": "of `kvmig up --allowed-origins`",
    "--end-with-stdin": "the fleet's own",
    "--front-apart": "the fleet's own",
    "--heartbeat-descriptor": "the fleet's own",
    "--instances": "instances.min",
    "--instance-gpus": "gpus",
    "--max-instances": "instances.max",
    "--min-instances": "instances.min",
    "--autoscale": "instances.target with target_kind: freeness",
    "--start-timeout": "instances.start_timeout_s",
    "--shutdown-timeout": "of `kvmig up`",
    "--served-model-name": "name and aliases",
    "--api-key": "keys of the fleet (`kvmig key add`)",
    "--front-ends": "the fleet's own",
    "--engine": "engine",
    "--load": "load",
    "--ray": "of `kvmig up`",
    "--instance-node": "the fleet's own",
    "--ray-files": "the fleet's own",
    "--ray-fleet": "the fleet's own",
    "--instance-vllm": "vllm",
}
"""Flags that a spec says otherwise."""
MOST_S = 7 * 86400.0
MOST_BYTES = 1 << 50
MOST_GPUS = 64
WORKERS = ("--tensor-parallel-size", "-tp")
"""Names of the flag with the number of workers."""
GPU = re.compile(r"\d{1,4}|(GPU|MIG)-[0-9A-Za-z./_-]{1,100}")
"""A GPU's index, or its UUID."""
UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Name of a unit."""
LABEL = re.compile(r"[A-Za-z0-9._/-]{1,64}")
"""Name or value of a worker's label."""
LEAST_UNIT = 1 << 20
"""Least bytes of a unit's KV cache."""
LOAD_FORMAT = "--load-format"
WORD_BYTES = 1 << 16
"""Most bytes of all flags of a model, and of a command."""

COMMAND_ONLY: Mapping[str, object] = {
    "command": (), "health": HEALTH, "served": "", "parallel": 0,
    "stream_usage": True, "hang_timeout_s": HANG_S, "pass_environment": (),
}  # fmt: skip
"""Fields that only models with `engine: command` have, with what they are without it."""
HEALTH_PATH = re.compile(r"/[\x21-\x7e]{0,200}")

Engine = Literal["vllm", "transformers", "toy", "command"]
TargetKind = Literal["concurrency", "rps", "freeness"]
Warm = Literal["none", "parked", "always"]
Load = Literal["", "auto"]
PlacementStrategy = Literal["", "spread", "pack"]
TensorParallel = Literal["", "auto"]


class InstanceCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many, and when."""

    min: int = 0
    max: int = 1
    target: float = 8.0
    """What one instance is for: requests at once, arrivals a second, or blocks of freeness."""
    target_kind: TargetKind = "concurrency"
    zero_after_s: float = 300.0
    """Seconds without a request until no instance is left; with min 0 only."""
    start_timeout_s: float = 600.0
    schedule: tuple[ScheduledFloor, ...] = ()
    """More than min, at certain times."""


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model, as its user writes it."""

    name: str
    source: str
    """path: and a folder, or where its files are fetched from (see `kvmig.sources.source`)."""
    engine: Engine = "vllm"
    flags: tuple[str, ...] = ()
    """The engine's, and kvmig.serve's."""
    command: tuple[str, ...] = ()
    """The command line of a server of the OpenAI API, with engine command (see
    `kvmig.command.template`)."""
    health: str = HEALTH
    """Path of that server that answers 200 once it takes calls."""
    served: str = ""
    """What that server calls the model; empty: by its name."""
    parallel: int = 0
    """Requests that such a server works for at once, at most; others wait. 0: as many as come."""
    stream_usage: bool = True
    """Whether that server takes `stream_options.include_usage`."""
    hang_timeout_s: float = HANG_S
    """Seconds without a sign of life until that server is ended, and started again."""
    pass_environment: tuple[str, ...] = ()
    """Environment variables of `kvmig up` that such a server gets beyond the usual ones."""
    load: Load = ""
    """auto: weights are read in the way that is measured to be the fastest, once for a model;
    empty: as the flags say."""
    vllm: str = ""
    """Folder of the build of vLLM that its instances are; empty: the installed one."""
    instances: InstanceCounts = InstanceCounts()
    aliases: tuple[str, ...] = ()
    """The model's other names."""
    adapters: Mapping[str, str] = {}
    """LoRA adapters by the name that requests give: a folder each."""
    warm: Warm = "none"
    """What is left without requests. parked: processes and weights, with no memory for a KV cache;
    always: one instance at least."""
    share_prefixes: bool = False
    """Whether what is cached of one user's prompts, media and grammars serves all users."""
    memory: int = 0
    """Bytes of the host's that an instance takes; 0: estimated."""
    gpus: tuple[str, ...] = ()
    """GPUs that its instances may have, by index or UUID; empty: any."""
    gpus_per_instance: int = 0
    """GPUs of an instance, with a worker on each; 0: as the flags say, or 1."""
    tensor_parallel: TensorParallel = ""
    """auto: the fleet chooses the GPUs of an instance at each start; empty: they are given."""
    gpu_memory: int = 0
    """Bytes of each of its GPUs that an instance takes; 0: estimated, until it is measured. Without
    the KV cache, if it is in a unit. With `tensor_parallel`: of all its GPUs together."""
    unit: str = ""
    """The unit whose models share KV cache on one GPU; empty: it has a KV cache of its own."""
    unit_memory: int = 0
    """Bytes of KV cache of the whole unit; if its models differ, the largest counts."""
    worker_selector: Mapping[str, str] = {}
    """Labels of the workers that its instances may be on; empty: any."""
    prefetch: bool = False
    """Whether its files come to each of these workers before an instance is to start there."""
    placement_strategy: PlacementStrategy = ""
    """How the place of an instance is chosen; empty: as `kvmig up --gpu-placement` has it."""
    priority: int = 0
    """Order of models that wait for a start: smaller ones first; larger ones end first where room
    is wanted."""
    max_held: int = 1000
    """Requests at most that wait for its start."""
    heartbeat_after_s: float = 10.0
    """Seconds without an answer until a streaming client gets SSE keep-alives."""

    @property
    def least(self) -> int:
        """Minimum of instances, which no schedule lowers."""
        return max(self.instances.min, self.warm == "always")

    @property
    def workers(self) -> int:
        """Workers of an instance, on a GPU each where there are GPUs."""
        return number_in(self.flags, self.gpus_per_instance or 1, *WORKERS)

    @property
    def memory_each(self) -> int:
        """Bytes of each of its GPUs that an instance takes, as given; 0: they are not."""
        return -(-self.gpu_memory // (self.workers if self.tensor_parallel else 1))

    @property
    def library(self) -> str:
        """The engine whose libraries its deployment needs; empty: none."""
        return "" if self.engine == "command" else self.engine

    @property
    def folder(self) -> str:
        """The folder of its source; no folder's name where its files are yet to be fetched."""
        return self.source.removeprefix(PATH)


ALLOWED = {
    "engine": get_args(Engine),
    "instances.target_kind": get_args(TargetKind),
    "warm": get_args(Warm),
    "load": ("auto",),
    "placement_strategy": ("spread", "pack"),
    "tensor_parallel": ("auto",),
}
"""Allowed values of each field that takes certain words."""
GET_ONE = "the source hf:ORG/NAME is a model of the Hugging Face Hub"
FIELDS = {"": ModelSpec.__struct_fields__, "instances": InstanceCounts.__struct_fields__}
"""The fields of each struct; all others are floors."""


def spec_of(given: Any) -> ModelSpec:
    """Read a spec from parsed JSON or YAML. Raises ConfigError."""
    if not isinstance(given, dict):
        raise ConfigError(f"a model is {given!r:.100}, must be a mapping with name and source")
    who = given.get("name")
    who = who if isinstance(who, str) and NAME.fullmatch(who) else "?"
    for field, what in LATER.items():
        if field in given:
            raise ConfigError(f"model {who}: {field} is {given[field]!r:.100}: {what} comes later")
    for field in ("flags", "command"):
        text = given.get(field)
        if isinstance(text, str):
            try:
                given = {**given, field: shlex.split(text)}
            except ValueError as error:
                raise ConfigError(f"model {who}: {field} is {text!r:.100}: {error}") from error
    try:
        spec = msgspec.convert(given, ModelSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model {who}: {_sentence(str(error), given)}") from error
    return check_spec(spec)


def _sentence(error: str, given: Any) -> str:
    """What msgspec says of a wrong field, with its value and what is allowed."""
    said, _, path = error.partition(" - at `$")
    path = path.strip("`.")
    where = f"{path}: " if path else ""
    if (word := re.search(r"unknown field `(.*)`", said, re.DOTALL)) is not None:
        known = ", ".join(FIELDS.get(path, ScheduledFloor.__struct_fields__))
        return f"{where}{word[1]!r:.100} is no field, must be one of {known}"
    if (word := re.search(r"missing required field `(.*)`", said)) is not None:
        return f"{where}{word[1]} is missing"
    value, steps = given, re.findall(r"[^.\[\]]+", path.replace("[...]", ""))
    try:
        for step in steps:
            value = value[int(step)] if isinstance(value, list | tuple) else value[step]
    except (LookupError, TypeError, ValueError):  # a field's name may look like a path
        steps = []
    if not steps:
        return " ".join(error.split())
    words = ALLOWED.get(path)
    must = " or ".join(words) if words else re.sub("^Expected (.*), got .*", r"\1", said)
    return f"{path} is {value!r:.100}, must be {must.replace('`', '')}"


def check_spec(spec: ModelSpec) -> ModelSpec:
    """Returns the specification unchanged. Raises ConfigError."""
    for name in (spec.name, *spec.aliases, *spec.adapters):
        _check_name(name)
    where = f"model {spec.name}"
    try:
        source = parse_source(spec.source)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if spec.engine == "command":
        _check_command(where, spec)
    else:
        _check_no_command(where, spec)
    if spec.engine not in ("toy", "command") and not source.is_remote:
        note_path(spec.folder, where)
        if not Path(spec.folder).is_dir() and Path(spec.folder).is_absolute():
            raise ConfigError(
                f"{where}: source is {spec.folder!r:.200}, which is no folder here; {GET_ONE}"
            )
        _check_folder(f"{where}: source", spec.folder)
    if spec.adapters and spec.engine != "vllm":
        raise ConfigError(f"{where}: adapters is given, must be left out: {spec.engine} has none")
    for name, folder in spec.adapters.items():
        _check_folder(f"{where}: adapters.{name}", folder)
    _check_vllm(where, spec)
    _check_instances(where, spec.instances)
    if spec.warm == "parked" and spec.engine in ("transformers", "command"):
        raise ConfigError(f"{where}: warm is 'parked', must be none or always with {spec.engine}")
    _check_range(f"{where}: memory", spec.memory, 0, MOST_BYTES)
    _check_gpus(where, spec)
    _check_unit(where, spec)
    _check_selector(where, spec.worker_selector)
    _check_range(f"{where}: priority", spec.priority, -1000, 1000)
    _check_range(f"{where}: max_held", spec.max_held, 0, 1_000_000)
    _check_range(f"{where}: heartbeat_after_s", spec.heartbeat_after_s, 0, MOST_S)
    _check_flags(where, spec.flags)
    _check_text(where, spec)
    return spec


def _check_text(where: str, spec: ModelSpec) -> None:
    """Raises ConfigError for what no other process could be sent: proxies would get no model's
    route any more."""
    for field in spec.__struct_fields__:
        try:
            msgspec.json.encode(getattr(spec, field))
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: {field} has {error.object!r:.100}, must be Unicode text"
            ) from error


def _check_vllm(where: str, spec: ModelSpec) -> None:
    """What only vLLM has."""
    for field in ("vllm", "load"):
        if getattr(spec, field) and spec.engine != "vllm":
            raise ConfigError(
                f"{where}: {field} is given, must be left out: engine is {spec.engine}"
            )
    if spec.vllm:
        _check_folder(f"{where}: vllm", spec.vllm)
    if spec.load and text_in(spec.flags, LOAD_FORMAT):
        raise ConfigError(f"{where}: load is given, must be left out: flags has {LOAD_FORMAT}")


def _check_command(where: str, spec: ModelSpec) -> None:
    """What holds for a model whose server is another's program."""
    _check_words(f"{where}: command", spec.command)
    try:
        check_template(spec.command)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    program = spec.command[0]
    note_path(program, where)
    if shutil.which(program) is None:
        raise ConfigError(
            f"{where}: command begins with {program!r:.200}, which is no program here"
        )
    note_path(spec.folder, where)
    if not parse_source(spec.source).is_remote and not Path(spec.folder).exists():
        raise ConfigError(f"{where}: source is {spec.folder!r:.200}, which is not here; {GET_ONE}")
    if not spec.memory:
        raise ConfigError(
            f"{where}: memory is 0, must be the bytes of the host's memory that an instance takes:"
            " they can't be computed for a command"
        )
    if spec.gpus and not spec.gpu_memory:
        raise ConfigError(
            f"{where}: gpu_memory is 0, must be the bytes that an instance takes of each of gpus"
        )
    if not spec.share_prefixes:
        raise ConfigError(
            f"{where}: share_prefixes is false, must be true with engine command: kvmig can't keep"
            " users apart in what another engine caches of their prompts"
        )
    if HEALTH_PATH.fullmatch(spec.health) is None:
        raise ConfigError(
            f"{where}: health is {spec.health!r:.100}, must be a path such as {HEALTH}"
        )
    _check_range(f"{where}: parallel", spec.parallel, 0, 1_000_000)
    _check_range(f"{where}: hang_timeout_s", spec.hang_timeout_s, 1, MOST_S)
    check_named(where, spec.pass_environment)
    if spec.flags:
        raise ConfigError(f"{where}: flags is given, must be left out: command has its own")
    if spec.instances.target_kind == "freeness":
        raise ConfigError(
            f"{where}: instances.target_kind is 'freeness', must be concurrency or rps with engine"
            " command"
        )


def _check_no_command(where: str, spec: ModelSpec) -> None:
    for field, usual in COMMAND_ONLY.items():
        if getattr(spec, field) != usual:
            raise ConfigError(
                f"{where}: {field} is given, must be left out: it is for engine command"
            )


def _check_gpus(where: str, spec: ModelSpec) -> None:
    _check_range(f"{where}: gpu_memory", spec.gpu_memory, 0, MOST_BYTES)
    _check_range(f"{where}: gpus_per_instance", spec.gpus_per_instance, 0, MOST_GPUS)
    for at, one in enumerate(spec.gpus):
        if GPU.fullmatch(one) is None:
            raise ConfigError(
                f"{where}: gpus[{at}] is {one!r:.100}, must be an index as nvidia-smi has it, or a"
                " UUID as GPU-... or MIG-..."
            )
    if len(set(spec.gpus)) < len(spec.gpus):
        raise ConfigError(f"{where}: gpus is {list(spec.gpus)!r:.200}, must name each GPU once")
    _check_tensor_parallel(where, spec)
    workers = spec.workers
    if spec.gpus_per_instance not in (0, workers):
        raise ConfigError(
            f"{where}: gpus_per_instance is {spec.gpus_per_instance}, must be {workers}, which"
            " --tensor-parallel-size in flags is, or be left out"
        )
    if spec.gpus and len(spec.gpus) < workers:
        raise ConfigError(
            f"{where}: gpus has {len(spec.gpus)}, must have {workers} or more: an instance has a"
            " worker on each"
        )


def _check_tensor_parallel(where: str, spec: ModelSpec) -> None:
    if not spec.tensor_parallel:
        return
    if spec.engine not in ("vllm", "toy"):
        raise ConfigError(
            f"{where}: tensor_parallel is given, must be left out: it is for engine vllm"
        )
    for field, given in (
        ("gpus_per_instance", spec.gpus_per_instance),
        ("unit", spec.unit),
        (WORKERS[0], text_in(spec.flags, *WORKERS)),
    ):
        if given:
            raise ConfigError(
                f"{where}: {field} is {given}, must be left out with tensor_parallel auto"
            )
    if spec.warm == "parked":
        raise ConfigError(
            f"{where}: warm is 'parked', must be none or always with tensor_parallel auto"
        )


def _check_unit(where: str, spec: ModelSpec) -> None:
    if not spec.unit:
        if spec.unit_memory:
            raise ConfigError(
                f"{where}: unit_memory is {spec.unit_memory}, must be left out without unit"
            )
        return
    if UNIT.fullmatch(spec.unit) is None:
        raise ConfigError(
            f"{where}: unit is {spec.unit!r:.100}, must be letters, digits and . _ -, at most 64,"
            " the first a letter or a digit"
        )
    if not LEAST_UNIT <= spec.unit_memory <= MOST_BYTES:
        raise ConfigError(
            f"{where}: unit_memory is {spec.unit_memory}, must be {LEAST_UNIT} to {MOST_BYTES}:"
            f" bytes of KV cache that the models of unit {spec.unit} share"
        )
    for field, value, allowed in (
        ("engine", spec.engine, "vllm"),
        ("gpus_per_instance", spec.workers, 1),
        ("instances.max", spec.instances.max, 1),
    ):
        if value != allowed:
            raise ConfigError(f"{where}: {field} is {value}, must be {allowed} in a unit")
    if any(word.partition("=")[0] == "--unit" for word in spec.flags):
        raise ConfigError(f"{where}: flags has --unit: that is unit")


def _check_selector(where: str, selector: Mapping[str, str]) -> None:
    for name, value in selector.items():
        for text in (name, value):
            if LABEL.fullmatch(text) is None:
                raise ConfigError(
                    f"{where}: worker_selector has {name!r:.100}: {value!r:.100}, must be names and"
                    " values of letters, digits and . _ - /, at most 64 each"
                )


def number_in(flags: Sequence[str], usual: int, *names: str) -> int:
    """The number that a flag gives. usual: if it isn't given, or isn't a number."""
    given = text_in(flags, *names)
    return int(given) if given.isdecimal() else usual


def text_in(flags: Sequence[str], *names: str) -> str:
    """What a flag of one of these names is given, the last one; empty: nothing."""
    found = ""
    for at, word in enumerate(flags):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else "".join(flags[at + 1 : at + 2])
    return found


def _check_instances(where: str, instances: InstanceCounts) -> None:
    _check_range(f"{where}: instances.min", instances.min, 0, 1000)
    _check_range(f"{where}: instances.max", instances.max, 1, 1000)
    if instances.max < instances.min:
        raise ConfigError(
            f"{where}: instances.max is {instances.max}, must be {instances.min} or more, which"
            " instances.min is"
        )
    if not 0 < instances.target <= 1e6:
        raise ConfigError(
            f"{where}: instances.target is {instances.target:g}, must be more than 0, at most"
            " 1000000"
        )
    _check_range(f"{where}: instances.zero_after_s", instances.zero_after_s, 0, MOST_S)
    _check_range(f"{where}: instances.start_timeout_s", instances.start_timeout_s, 1, MOST_S)
    if instances.schedule and instances.target_kind == "freeness":
        raise ConfigError(
            f"{where}: instances.target_kind is 'freeness', must be concurrency or rps with a"
            " schedule"
        )
    for number, floor in enumerate(instances.schedule):
        field = f"{where}: instances.schedule[{number}]"
        _check_range(f"{field}.min", floor.min, 1, instances.max)
        try:
            parse_cron(floor.during)
            zone_of(floor.timezone)
        except ConfigError as error:
            raise ConfigError(f"{field}: {error}") from error


def _check_words(field: str, words: Iterable[str]) -> None:
    """Raises ConfigError for words that no program can be started with."""
    text = "\n".join(words)
    try:
        sound = len(text.encode()) <= WORD_BYTES and "\0" not in text
    except UnicodeEncodeError:
        sound = False
    if not sound:
        raise ConfigError(
            f"{field} is {text!r:.200}, must be Unicode text without 0, at most {WORD_BYTES} bytes"
        )


def _check_flags(where: str, flags: Sequence[str]) -> None:
    _check_words(f"{where}: flags", flags)
    for word in flags:
        if (flag := word.partition("=")[0]) in OURS:
            raise ConfigError(f"{where}: flags has {flag}: that is {OURS[flag]}")


def _check_range(field: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{field} is {value:g}, must be {least:g} to {most:g}")


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name) or ".." in name or RESERVED_PARTS & set(name.split("/")):
        raise ConfigError(f"name is {name!r:.150}, must be {NAMES}")
    if name.endswith(RESERVED_ENDS):
        ends = ", ".join(RESERVED_ENDS)
        raise ConfigError(f"name is {name!r:.150}, must not end with any of {ends}")


def _check_folder(field: str, folder: str) -> None:
    if not Path(folder).is_absolute():
        raise ConfigError(f"{field} is {folder!r:.200}, must be a folder's whole path")
    note_path(folder, field)
    if not Path(folder).is_dir():
        raise ConfigError(f"{field} is {folder!r:.200}, which is no folder here")


class FleetFile(msgspec.Struct, frozen=True):
    """The content of a fleet's file."""

    models: tuple[ModelSpec, ...] = ()
    aliases: Mapping[str, Mapping[str, int]] = {}
    """Names that stand for several models: of each how many requests of how many it gets."""


class _Loader(yaml.SafeLoader):
    """Takes no mapping that says one thing twice, of which YAML's would forget the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"line {line}: {key.value!r:.100} is there twice")
            seen.add(key.value)
        return node

    def construct_date(self, node: yaml.ScalarNode) -> str:
        """Dates stay text, as in JSON."""
        return str(self.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.construct_date)


def read_yaml(text: str) -> Any:
    """What a file says, for `fleet_of`: what JSON can say, too. Raises ConfigError."""
    try:
        found = _Loader(text).get_single_data()
        json.dumps(found, allow_nan=False)
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"it is no plain YAML: {' '.join(str(error).split())}") from error
    return found


def fleet_of(given: Any, folder: Path | None = None) -> FleetFile:
    """Read a fleet's parsed JSON or YAML: `models`, a list, and `aliases`. Raises ConfigError.

    folder: what relative paths in it mean; None: there are none.
    """
    if not isinstance(given, dict) or given.keys() - {"models", "aliases"}:
        raise ConfigError(f"the file holds {given!r:.100}, must be `models:` and `aliases:`")
    listed = given.get("models") or []
    if not isinstance(listed, list):
        raise ConfigError(f"models is {listed!r:.100}, must be a list")
    specs = [spec_of(one if folder is None else _absolute(one, folder)) for one in listed]
    try:
        aliases = msgspec.convert(given.get("aliases") or {}, dict[str, dict[str, int]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"aliases: {error}") from error
    return check_names(FleetFile(tuple(specs), aliases))


def _absolute(given: Any, folder: Path) -> Any:
    """The same with whole paths."""
    if not isinstance(given, dict):
        return given
    found = dict(given)
    source = found.get("source")
    if isinstance(source, str) and source.startswith(PATH):
        found["source"] = PATH + str(folder / source.removeprefix(PATH))
    if isinstance(vllm := found.get("vllm"), str) and vllm:
        found["vllm"] = str(folder / vllm)
    adapters = found.get("adapters")
    if isinstance(adapters, dict) and all(isinstance(one, str) for one in adapters.values()):
        found["adapters"] = {name: str(folder / one) for name, one in adapters.items()}
    return found


def check_names(fleet: FleetFile) -> FleetFile:
    """Returns the file unchanged if its names are unique and its aliases stand for models.

    Raises ConfigError.
    """
    whose: dict[str, str] = {}
    for spec in fleet.models:
        for field, names in _names(spec):
            for name in names:
                if name in whose:
                    raise ConfigError(
                        f"model {spec.name}: {field} is {name}, which is {whose[name]} already"
                    )
                whose[name] = f"{field} of model {spec.name}"
    models = {spec.name for spec in fleet.models}
    for alias, targets in fleet.aliases.items():
        _check_name(alias)
        if alias in whose:
            raise ConfigError(f"aliases.{alias}: that is {whose[alias]} already")
        if not targets:
            raise ConfigError(f"aliases.{alias} is empty, must name models and weights")
        for model, weight in targets.items():
            if model not in models:
                known = ", ".join(sorted(models)) or "there is none"
                raise ConfigError(f"aliases.{alias}: {model!r:.150} is no model, models: {known}")
            _check_range(f"aliases.{alias}.{model}", weight, 1, 1_000_000)
    return fleet


def standing_for(fleet: FleetFile, model: str) -> str:
    """An alias that stands for this model, among others; empty: there is none."""
    return next((alias for alias, targets in fleet.aliases.items() if model in targets), "")


def check_callable(fleet: FleetFile, names: Iterable[str]) -> None:
    """Whether requests can give these names: models', adapters', or aliases.

    Raises ConfigError.
    """
    known = {*fleet.aliases}
    known.update(name for spec in fleet.models for _, names in _names(spec) for name in names)
    for name in names:
        if name not in known:
            there = ", ".join(sorted(known)) or "there is none"
            raise ConfigError(
                f"models has {name!r:.150}, which is no model, adapter or alias; there are: {there}"
            )


def _names(spec: ModelSpec) -> Sequence[tuple[str, Iterable[str]]]:
    return (("name", [spec.name]), ("an alias", spec.aliases), ("an adapter", spec.adapters))


# -- what an order changes


class SpecChange(msgspec.Struct, frozen=True):
    """One thing that an order adds (before: None), changes, or removes (after: None)."""

    action: Literal["add", "change", "remove", "switch", "revoke"]
    kind: Literal["model", "alias", "user", "key", "placement"]
    name: str
    before: Any
    after: Any


def merged(old: FleetFile, given: FleetFile, *, prune: bool) -> FleetFile:
    """A catalogue with what a file says of it; prune: with nothing else. Raises ConfigError."""
    if prune:
        return check_names(given)
    named = {spec.name: spec for spec in (*old.models, *given.models)}
    return check_names(FleetFile(tuple(named.values()), {**old.aliases, **given.aliases}))


def scaled(spec: ModelSpec, least: int | None, most: int | None) -> ModelSpec:
    """The same with other bounds of its instances. Raises ConfigError."""
    instances = msgspec.structs.replace(
        spec.instances,
        min=spec.instances.min if least is None else least,
        max=spec.instances.max if most is None else most,
    )
    _check_instances(f"model {spec.name}", instances)
    return msgspec.structs.replace(spec, instances=instances)


def changes(old: FleetFile, new: FleetFile) -> list[SpecChange]:
    """What makes the one catalogue the other, by kind and name."""
    return [
        *_changes("model", {one.name: one for one in old.models}, {s.name: s for s in new.models}),
        *_changes("alias", old.aliases, new.aliases),
    ]


def _changes(
    kind: Literal["model", "alias"], old: Mapping[str, Any], new: Mapping[str, Any]
) -> Iterable[SpecChange]:
    for name in sorted(old.keys() | new.keys()):
        before = msgspec.to_builtins(old.get(name))
        after = msgspec.to_builtins(new.get(name))
        if before != after:
            action: Literal["add", "change", "remove"] = (
                "add" if before is None else "remove" if after is None else "change"
            )
            yield SpecChange(action, kind, name, before, after)
