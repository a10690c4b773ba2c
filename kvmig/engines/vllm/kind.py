"""vLLM as a kind of engine: implements `kvmig.engines.kind.EngineKind`."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from kvmig.engines.base import ServingEngine
from kvmig.engines.vllm import flags
from kvmig.engines.vllm.preload import preloaded
from kvmig.engines.vllm.scheduling_policy import scheduling_flags
from kvmig.engines.vllm.version import check_version
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import KvmigError, StartupError


class VllmKind:
    """`argv` is what `vllm serve` takes."""

    takes_units = True
    shares_memory = True

    def prepare(self) -> None:
        check_version()
        flags.set_environment()

    def load(self) -> None:
        importlib.import_module("kvmig.engines.vllm.config")
        importlib.import_module("kvmig.engines.vllm.serving")
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            importlib.import_module("vllm.v1.worker.cpu_worker")

    def parse(self, argv: list[str]) -> Namespace:
        return flags.parse(argv)

    def check_gpus(self, args: Namespace, gpu_ids: Sequence[str]) -> None:
        """Nothing: vLLM's build says what it runs on."""

    def print_help(self) -> None:
        flags.print_help()

    def flags_for(self, words: Sequence[str], config: ClusterConfig) -> list[str]:
        return scheduling_flags(words, config.priorities)

    def preloaded(self, present: str) -> str:
        return preloaded(present)

    def weights(self, args: Namespace) -> str:
        from kvmig.engines.vllm.identity import identity_of_args

        return identity_of_args(args)

    def make(self, argv: list[str], unit_tokens: int) -> ServingEngine:
        from kvmig.engines.vllm.config import engine_config, why_not
        from kvmig.engines.vllm.eager import compile_nothing
        from kvmig.engines.vllm.identity import identity_of_args
        from kvmig.engines.vllm.serving import ServingVllm

        args = flags.parse(argv)
        if args.enforce_eager:
            compile_nothing()
        try:
            config = engine_config(args)
            identify = partial(identity_of_args, args)
            return ServingVllm(config, unit_tokens=unit_tokens, identify=identify)
        except KvmigError:
            raise
        except Exception as error:
            # Whatever vLLM says about the model or the machine: the launcher prints it.
            raise StartupError(f"can't serve {args.model}: {why_not(error, args)}") from error
