"""`pytest -p tests.support.runner_v2`: vLLM's model runner V2 on a CPU, its Triton interpreted.

vLLM runs V2 on GPUs for every model. On a CPU it has no Triton: the interpreter stands in for a
backend, and about 95 ms a token are the price. For tests only.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import torch
from triton.backends import backends
from triton.runtime import interpreter

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
_ONE = threading.RLock()
_run_grid = interpreter.GridExecutor.__call__


def one_at_a_time(self: interpreter.GridExecutor, *args: Any, **options: Any) -> None:
    """The interpreter keeps where it is in a grid once a process, and engines have threads."""
    with _ONE:
        _run_grid(self, *args, **options)


interpreter.GridExecutor.__call__ = one_at_a_time


class GrammarMask:
    """In place of vLLM's kernel of that name, whose mask the interpreter takes for no mask."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.apply

    @staticmethod
    def apply(
        logits: torch.Tensor,
        _stride: int,
        places: torch.Tensor,
        starts: torch.Tensor,
        masks: torch.Tensor,
        _mask_stride: int,
        vocabulary: int,
        *,
        MASK_STRIDE: int,  # noqa: N803 - the kernel's
        **_: int,
    ) -> None:
        """places: request and position of each mask; starts: a request's first row of logits."""
        for mask, place in zip(masks, places.tolist(), strict=True):
            request, position = divmod(place, MASK_STRIDE)
            row, end = starts[request : request + 2].tolist()
            if row + position < end:
                bits = (mask[:, None] >> torch.arange(32)) & 1
                logits[row + position, bits.flatten()[:vocabulary] == 0] = -math.inf


def pytest_collection_finish() -> None:
    """Leave kernels out that the interpreter can't run: it makes a loop's index a plain int."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.gpu import structured_outputs

    vars(topk_topp_sampler)["HAS_TRITON"] = False
    vars(structured_outputs)["_apply_grammar_bitmask_kernel"] = GrammarMask()
