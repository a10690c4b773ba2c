"""A vLLM engine's start: how long its parts take, and when it may compile."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from vllm import envs
from vllm.compilation.counter import compilation_counter
from vllm.config import CompilationMode, VllmConfig
from vllm.config.utils import hash_factors
from vllm.platforms import current_platform
from vllm.v1.executor import Executor

from kvmig.core.start_times import Compiled, EngineTimes
from kvmig.engines.vllm.compile_turns import compile_turn


class StartClock:
    """Times the parts of making one engine."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what the block takes, as field `name` of `EngineTimes`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def times(self, config: VllmConfig, executor: Executor) -> EngineTimes:
        """What was counted. vLLM compiles in its first step, which is taken to measure memory, or
        to warm up where there is no KV cache: that part is what is left without compiling."""
        seconds, compilation = dict(self._seconds), config.compilation_config
        compile_s = compilation.compilation_time + compilation.encoder_compilation_time
        if compiles(config) and current_platform.is_cpu():  # where vLLM doesn't count it
            compile_s = seconds.get("memory_s", 0.0)
        for name in ("memory_s", "graphs_s"):
            if 0 < compile_s <= seconds.get(name, 0.0):
                seconds[name] -= compile_s
                break
        return EngineTimes(compile_s=compile_s, compiled=_compiled(config, executor), **seconds)


def timed(kind: type[Executor], clock: StartClock) -> type[Executor]:
    """The executor that counts the parts of its start."""

    class TimedExecutor(kind):
        """vLLM's executor; each method is its own, and is timed."""

        def _init_executor(self) -> None:
            with clock.part("weights_s"):
                super()._init_executor()

        def determine_available_memory(self) -> list[int]:
            with clock.part("memory_s"), compiling(self.vllm_config):
                found: list[int] = super().determine_available_memory()
                return found

        def initialize_from_config(self, kv_cache_configs: Any) -> None:
            with clock.part("kv_cache_s"):
                super().initialize_from_config(kv_cache_configs)

        def compile_or_warm_up_model(self) -> None:
            with clock.part("graphs_s"):
                super().compile_or_warm_up_model()

    return TimedExecutor


def _compiled(config: VllmConfig, executor: Executor) -> Compiled:
    """The origin of the compiled graph; not known of workers that are other processes."""
    if not compiles(config) or getattr(executor, "workers", None):
        return ""
    if compilation_counter.num_aot_compiles or compilation_counter.num_inductor_compiles:
        return "made"
    return "found" if compilation_counter.num_aot_artifacts_loaded else ""


def compiles(config: VllmConfig) -> bool:
    """Whether the engine's model is compiled, and what is compiled is kept."""
    return config.compilation_config.mode != CompilationMode.NONE and not (
        envs.VLLM_DISABLE_COMPILE_CACHE
    )


def compile_key(config: VllmConfig) -> str:
    """What is compiled, as vLLM's own cache distinguishes configurations, and on which device."""
    factors = (
        hash_factors(envs.compile_factors()),
        config.compute_hash(),
        current_platform.get_device_name(),
        config.parallel_config.world_size,
    )
    return hashlib.blake2b(repr(factors).encode(), digest_size=8).hexdigest()


@contextmanager
def compiling(config: VllmConfig) -> Iterator[None]:
    """Compile in the block, after any other instance that compiles the same."""
    if not compiles(config):
        yield
        return
    folder = Path(envs.VLLM_CACHE_ROOT) / "torch_compile_cache"
    with compile_turn(folder, compile_key(config)) as turn, loading_what_was_compiled():
        yield
        turn.end(compiled=True)


@contextmanager
def loading_what_was_compiled() -> Iterator[None]:
    """Let vLLM load in the block what it has compiled on a CPU.

    There it is a plain function. vLLM calls a method on it that only the compiled code for other
    devices has, takes the failure for a broken file, and would compile again at each start.
    """
    load = torch.compiler.load_compiled_function

    def load_complete(*arguments: Any, **options: Any) -> Any:
        loaded: Any = load(*arguments, **options)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda config: None
        return loaded

    with patch.object(torch.compiler, "load_compiled_function", load_complete):
        yield
