"""`pytest -p tests.runner_v2`: vLLM's model runner V2 on a CPU, its Triton kernels interpreted.

vLLM runs V2 on GPUs for every model. On a CPU it has no Triton: the interpreter stands in for a
backend, and about 95 ms a token are the price. For tests only.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

from triton.backends import backends

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def pytest_collection_finish() -> None:
    """Leave a kernel out that the interpreter can't run: it makes a loop's index a plain int."""
    from vllm.v1.sample.ops import topk_topp_sampler

    vars(topk_topp_sampler)["HAS_TRITON"] = False
