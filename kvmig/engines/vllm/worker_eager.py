"""`--enforce-eager` on a CPU, kept to the letter; runs in the workers.

vLLM compiles some small functions of its sampler all the same (`torch.compile` with
`simple_compile_backend`, such as `vllm.v1.sample.ops.logprobs.batched_count_greater_than`). Each
takes seconds of a core, in every instance's process again, to save microseconds a step: an
instance that comes back or is added would serve that much later.
"""

from __future__ import annotations

from typing import Any

import torch


def compile_nothing(worker: Any) -> None:
    """Let this process run eagerly whatever asks to be compiled."""
    if worker.model_runner.device.type == "cpu":
        torch.compiler.set_stance("force_eager")
