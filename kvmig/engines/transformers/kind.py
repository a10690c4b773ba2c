"""transformers as a kind of engine: implements `kvmig.engines.kind.EngineKind`."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence

from kvmig.engines.base import ServingEngine
from kvmig.engines.offline import set_offline
from kvmig.engines.transformers import factory, flags
from kvmig.engines.transformers.version import check_version
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import ConfigError, KvmigError, StartupError


class TransformersKind:
    """`argv` is what `flags` has: names as of vLLM where they mean the same."""

    takes_units = False
    shares_memory = False

    def prepare(self) -> None:
        set_offline()
        check_version()

    def load(self) -> None:
        importlib.import_module("kvmig.engines.transformers.serving")

    def parse(self, argv: list[str]) -> Namespace:
        return flags.parse(argv)

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        if args.device == "cuda" and not gpu_ids:
            raise ConfigError("--device is cuda, but this machine has no GPU that may be used")

    def print_help(self) -> None:
        flags.parser().print_help()

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        if len(config.priorities) > 1:
            raise ConfigError(
                "--priority-class can't be used with --engine transformers: it runs requests"
                " in order of arrival"
            )
        if config.ray is not None:
            raise ConfigError("--ray can't be used with --engine transformers for now")
        return []

    def preloaded(self, present: str) -> str:
        return present

    def weights(self, args: Namespace) -> str:
        from kvmig.engines.transformers.config import identify, parse

        return identify(parse(flags.engine_fields(args)))

    def make(self, argv: list[str], unit_tokens: int) -> ServingEngine:
        args = flags.parse(argv)
        try:
            return factory(**flags.engine_fields(args))
        except KvmigError:
            raise
        except Exception as error:
            # Whatever transformers says about the model or the machine: the launcher prints it.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise StartupError(f"can't serve {args.model}: {reason}") from error
