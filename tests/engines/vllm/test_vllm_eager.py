"""What vLLM's sampler would compile although nothing shall be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.platforms import current_platform

from kvmig.engines.vllm.config import compile_nothing

pytestmark = pytest.mark.engine


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


@pytest.mark.long  # for the import of the compiler
@pytest.mark.parametrize("cpu", [True, False])
def test_nothing_is_compiled_any_more_on_a_cpu_only(
    monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: cpu)
    assert compiles()
    compile_nothing()
    assert compiles() == (not cpu)
