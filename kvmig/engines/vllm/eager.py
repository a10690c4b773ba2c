"""`--enforce-eager` on a CPU, kept to the letter.

vLLM compiles some small functions of its sampler all the same (`torch.compile` with
`simple_compile_backend`, such as `vllm.v1.sample.ops.logprobs.batched_count_greater_than`). Each
takes seconds of a core, in every instance's process again, to save microseconds a step: an
instance that comes back or is added would serve that much later.
"""

from __future__ import annotations

import torch
from vllm.platforms import current_platform


def compile_nothing() -> None:
    """Let this process run eagerly whatever asks to be compiled: for an instance's own process."""
    if current_platform.is_cpu():
        torch.compiler.set_stance("force_eager")
