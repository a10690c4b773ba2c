"""`pytest -p tests.support.quick_runner_v2`: model runner V2 on a CPU, with torch for those of its
Triton kernels that each decode step needs (`bench.v2_on_cpu`).

tests/bench/test_v2_on_cpu.py compares what both write. All other kernels are interpreted, as they
all are with `tests.support.runner_v2`.
"""

from __future__ import annotations

from tests.support import runner_v2  # before vLLM: it looks for Triton's backends

# ruff: isort: split
from bench.v2_on_cpu import replace_kernels


def pytest_collection_finish() -> None:
    runner_v2.pytest_collection_finish()
    replace_kernels()
