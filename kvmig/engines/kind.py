"""The kinds of engines that the launcher can start, and what it must know of each."""

from __future__ import annotations

import os
from argparse import ArgumentDefaultsHelpFormatter, Namespace
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from kvmig.core.config import ClusterConfig, UnitConfig
from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.core.flag_parser import FlagParser
from kvmig.core.model_sizes import ModelSizes
from kvmig.core.start_times import EngineTimes
from kvmig.engines.base import ServingEngine

ALLOW_UNTESTED = "KVMIG_ALLOW_UNTESTED_VLLM"
"""Set in the environment: versions that kvmig wasn't tested with start, too, if they can."""


class LoadChoice(NamedTuple):
    """How weights are read."""

    words: tuple[str, ...] = ()
    """Flags for it."""
    lines: tuple[str, ...] = ()
    """Why, for people."""


class EnginePlugin(Protocol):
    """One kind of engine. Its flags come as `argv`: MODEL, and all that aren't kvmig's own."""

    takes_units: bool
    """Whether its instances can differ in shape (`MigrationConfig.unit_tokens`)."""
    shares_memory: bool
    """Whether it takes vLLM's flags that divide memory (`kvmig.launcher.gpu_division.flags`,
    `kvmig.launcher.environment.memory_flags`)."""

    def prepare(self) -> None:
        """Check the version and set the environment, before anything of it is imported.

        Raises StartupError.
        """
        ...

    def set_environment(self, environment: MutableMapping[str, str]) -> None:
        """Set what `prepare` sets in the environment of this process."""
        ...

    def check_tree(self, tree: str) -> str:
        """The version of the engine in a folder that is to go before the installed one.

        Raises ConfigError if there is none that kvmig supports.
        """
        ...

    def apart(self, tree: str, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that keep what it writes apart from what the installed one writes."""
        ...

    def load(self) -> None:
        """Import what `make` needs, after `prepare`, so that this process can be forked.

        Must start no thread and touch no device.
        """
        ...

    def parse(self, argv: list[str]) -> Namespace:
        """Parse the flags.

        The result has at least model, served_model_name, host, port, api_key, block_size,
        tensor_parallel_size, kv_cache_memory_bytes.

        Raises ConfigError.
        """
        ...

    def check_words(self, argv: list[str]) -> None:
        """Check the flags as far as possible without the engine's libraries, within milliseconds.

        `parse` checks the rest, when an instance starts. Raises ConfigError.
        """
        ...

    def check_config(self, args: Namespace) -> None:
        """What the model's own files say to the flags, without its weights. Raises ConfigError."""
        ...

    def sizes(self, args: Namespace) -> ModelSizes | None:
        """What it will take of memory, without loading anything; None: that isn't known.

        Only in a process that makes no engine afterwards. Raises ConfigError.
        """
        ...

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        """Whether what `args` wants runs on a machine with these GPUs. Raises ConfigError."""
        ...

    def print_help(self) -> None:
        """Print the help of its own flags."""
        ...

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        """Flags to add to those of all instances. words: all that any instance is given.

        Raises ConfigError for what this kind can't do, and for flags that say otherwise.
        """
        ...

    def needs_one_front_end(self, words: Sequence[str]) -> str:
        """What its application would keep in one front end alone; empty: nothing. words: as in
        `flags_for`."""
        ...

    def on_cpu(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that an instance on a CPU needs. environment: what it has, which stays."""
        ...

    def weights(self, args: Namespace) -> str:
        """The identity of the weights that an instance would have that is started now."""
        ...

    def weight_bytes(self, args: Namespace) -> int:
        """Bytes of the weights where they are loaded, all workers' together; 0: not known."""
        ...

    def choose_load(self, args: Namespace, gpu: DeviceRecord | None) -> LoadChoice:
        """Choose the fastest way to read the weights, which may be measured for that. gpu: one that
        an instance gets; None: they run on the CPU."""
        ...

    def kv_bytes(self, engine: ServingEngine) -> int:
        """Bytes that each worker of one that `make` made has found to have for its KV cache; 0:
        it looks for none."""
        ...

    def likeness(self, engine: ServingEngine) -> str:
        """What engines must be equal in besides their layouts, so that a request of one can go on
        at the other; in words."""
        ...

    def times(self, engine: ServingEngine) -> EngineTimes:
        """How long the parts of making it took; zeros where only the whole is known."""
        ...

    def make(
        self, argv: list[str], unit_tokens: int, unit: UnitConfig | None = None
    ) -> ServingEngine:
        """Load and return the engine. Raises StartupError or ConfigError.

        unit_tokens: of what it exchanges with other instances; 0: its own blocks. unit: the KV
        cache has no memory yet, which comes by `ServingEngine.sharing`, if it can, and steps keep
        to the unit's shares of the device where they can.
        """
        ...


class UnsizedEngineKind:
    """The answers to `EnginePlugin` of an engine that comes in one build, and has sizes only once
    it has loaded."""

    takes_units = False
    shares_memory = False
    name: str

    def check_tree(self, tree: str) -> str:
        raise ConfigError(f"{tree!r} is given as a vLLM, but --engine is {self.name}, must be vllm")

    def apart(self, tree: str, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def sizes(self, args: Namespace) -> None:
        """Return nothing: the sizes are not known."""

    def needs_one_front_end(self, words: Sequence[str]) -> str:
        return ""

    def on_cpu(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {}

    def weight_bytes(self, args: Namespace) -> int:
        return 0

    def choose_load(self, args: Namespace, gpu: DeviceRecord | None) -> LoadChoice:
        return LoadChoice()

    def kv_bytes(self, engine: ServingEngine) -> int:
        return 0

    def likeness(self, engine: ServingEngine) -> str:
        return ""

    def times(self, engine: ServingEngine) -> EngineTimes:
        return EngineTimes()


def flag_parser(engine: str) -> FlagParser:
    """The parser of an engine that runs on one device and has no flag for its cache's bytes."""
    root = FlagParser(
        prog=f"kvmig.serve --engine {engine}",
        allow_abbrev=False,
        add_help=False,
        formatter_class=ArgumentDefaultsHelpFormatter,
    )
    root.set_defaults(tensor_parallel_size=1, kv_cache_memory_bytes=None)
    return root


API_KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's variable with a key; the flag goes before it."""


def api_keys(given: Sequence[str] | None) -> list[str]:
    """The keys of the OpenAI API: those of --api-key, or of the environment, where only this user
    can read them. As vLLM has it: an empty key is none."""
    return [key for key in (given or [os.environ.get(API_KEY_VARIABLE, "")]) if key]


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}
"""Defaults of the environment; what the user has set stays."""


def set_offline(environment: MutableMapping[str, str] = os.environ) -> None:
    """Forbid downloads; call it before a library that knows hubs is imported."""
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)


def check_model(model: str) -> None:
    """Refuse a model that is not a folder on disk, unless the user allowed the hub."""
    if os.environ.get("HF_HUB_OFFLINE") != "1":
        return
    path = Path(model)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"MODEL is {model}, must be a folder with a config.json"
            " (to load from a hub, set HF_HUB_OFFLINE=0)"
        )
