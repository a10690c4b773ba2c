"""What a start finds of what was compiled before, and what it says of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationMode

from kvmig.engines.vllm import flags, starting
from kvmig.engines.vllm.config import engine_config
from kvmig.engines.vllm.starting import StartClock, compile_key, loading_what_was_compiled
from kvmig.models import BUNDLED
from tests.support.environment import environment
from tests.support.vllm_side import ENVIRONMENT

pytestmark = pytest.mark.engine


def key(*words: str) -> str:
    """Of an instance with these flags."""
    with environment(ENVIRONMENT):
        return compile_key(engine_config(flags.parse([str(BUNDLED), *words])))


def test_what_the_launcher_gives_each_instance_of_its_own_finds_the_same_compiled_code() -> None:
    first = key("--gpu-memory-utilization=0.4")
    assert first == key("--kv-cache-memory-bytes=64M", "--port=1", "--served-model-name=b")
    assert first == key("--num-gpu-blocks-override=40", "--seed=3")
    assert first != key("--max-num-seqs=7")


def config(compile_s: float, mode: CompilationMode = CompilationMode.VLLM_COMPILE) -> Any:
    compilation = SimpleNamespace(
        mode=mode, compilation_time=compile_s, encoder_compilation_time=0.0
    )
    return SimpleNamespace(compilation_config=compilation)


def test_the_part_in_which_vllm_compiles_is_what_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starting, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    now = iter((0.0, 9.0, 10.0, 12.0))
    monkeypatch.setattr(starting, "time", SimpleNamespace(monotonic=lambda: next(now)))
    clock = StartClock()
    with clock.part("memory_s"):
        pass
    with clock.part("graphs_s"):
        pass
    times = clock.times(config(7.0), SimpleNamespace(workers=[1]))
    assert (times.memory_s, times.compile_s, times.graphs_s) == (2.0, 7.0, 2.0)


def test_a_function_that_was_compiled_on_a_cpu_is_complete_once_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compiled() -> None: ...

    loaded = SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=compiled))
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda file: loaded)
    with loading_what_was_compiled():
        found: Any = torch.compiler.load_compiled_function(None)  # type: ignore[arg-type]
        found._artifacts.compiled_fn.finalize_loading(None)
    own = SimpleNamespace(finalize_loading="vLLM's")
    loaded._artifacts.compiled_fn = own
    with loading_what_was_compiled():
        torch.compiler.load_compiled_function(None)  # type: ignore[arg-type]
    assert own.finalize_loading == "vLLM's"
