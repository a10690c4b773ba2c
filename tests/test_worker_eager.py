"""What vLLM's sampler would compile although nothing shall be."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kvmig.engines.vllm.worker_eager import compile_nothing


def worker(device: str) -> SimpleNamespace:
    return SimpleNamespace(model_runner=SimpleNamespace(device=torch.device(device)))


@pytest.fixture(autouse=True)
def stance() -> Iterator[None]:
    with torch.compiler.set_stance("default"):
        yield


def compiles() -> bool:
    """Whether a function that asks for it is compiled here, by a compiler that does nothing."""
    seen = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        seen.append(graph)
        return graph

    torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(2))
    return bool(seen)


def test_on_a_cpu_nothing_is_compiled_any_more() -> None:
    assert compiles()
    compile_nothing(worker("cpu"))
    assert not compiles()


def test_on_a_gpu_what_asks_to_be_compiled_is() -> None:
    compile_nothing(worker("cuda"))
    assert compiles()
