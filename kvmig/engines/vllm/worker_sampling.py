"""Sampling of drafts on a CPU, put right; runs in the workers.

vLLM 0.32's stand-in for the kernel that repeats each request's sampling parameters for its drafts
writes to a copy of its output, unless that is of 64-bit integers. Temperatures and top-k are what
the memory held before: requests that sample get other tokens than they should, and a top-k that
can't be ends the engine.
"""

from __future__ import annotations

from typing import Any

import torch


def repeat_for_drafts(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    _most_tokens: int | None = None,
) -> None:
    """`values` [requests] into `output` [drafts], each as often as its request has drafts.

    cu_num_tokens: drafts up to and with each request [requests]. A value that is `replace_from`
    becomes `replace_to`. Example: [5, 7] and [2, 3] make [5, 5, 7].
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(values == replace_from, replace_to, values)
    output.copy_(replaced.repeat_interleave(counts))


def repair_drafts_on_a_cpu(worker: Any) -> None:
    """Let drafts be sampled with their requests' parameters."""
    from vllm.triton_utils.dispatcher import KernelOverride
    from vllm.v1.sample import rejection_sampler

    kernel = rejection_sampler.expand_kernel
    if worker.model_runner.device.type == "cpu" and isinstance(kernel, KernelOverride):
        kernel._impl = repeat_for_drafts
        constrain = rejection_sampler.apply_sampling_constraints

        def constrain_some(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            # A top-k of no drafts at all ends the engine, too.
            return constrain(logits, *args) if len(logits) else logits

        rejection_sampler.apply_sampling_constraints = constrain_some
