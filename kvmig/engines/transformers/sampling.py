"""Sampling that can move: a token depends on its request's seed and its position alone.

transformers draws all requests' tokens from one generator, so what one gets depends on who
else is in the batch. Here the engine takes the largest score always, and requests that sample
get Gumbel noise added to theirs first, which comes to the same (Gumbel-max: the argmax of
`scores + noise` is distributed as softmax of the scores). The noise is a hash of seed, position
and token, so there is no state that a migration would have to carry.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from transformers import TemperatureLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
)

from kvmig.engines.transformers.logprobs import Logprobs
from kvmig.engines.transformers.truncation import Truncation

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants, as signed numbers."""


class SeededNoise(ContinuousBatchingLogitsProcessor):
    """Adds noise to the scores of requests that sample."""

    supported_kwargs: dict[str, type] = {"seed": int}  # noqa: RUF012 - as the base has it
    ignored_kwargs: tuple[str, ...] = ()

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """No noise."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """One key a row [n], int32; 0: greedy. The batch's tokens count as computed by now."""
        states = [request.state for request in requests_with_new_token]
        keys = [
            key(state.logit_processor_kwargs.get("seed"), state.position_offset) for state in states
        ]
        return torch.tensor(keys, dtype=torch.int32, device="cpu")

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """scores [n, vocabulary], tensor_arg: keys [at least n]."""
        keys = tensor_arg[: scores.size(0)].to(torch.int64).unsqueeze(-1)
        noise = gumbel(keys, scores.size(1)).to(scores.dtype)
        return torch.where(keys == 0, scores, scores + noise)


def key(seed: int | None, position: int) -> int:
    """A positive int32 for the token at this position; 0 without a seed."""
    if seed is None:
        return 0
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % (2**31 - 1) + 1


def gumbel(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise [n, vocabulary], float64, by keys [n, 1], int64."""
    tokens = torch.arange(vocabulary, device=keys.device, dtype=torch.int64)
    bits = _mix(_mix(keys * _GOLDEN) + tokens * _GOLDEN)
    uniform = (_shifted(bits, 32).to(torch.float64) + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


def add_sampling(processors: ContinuousBatchingLogitsProcessorList) -> Logprobs:
    """Let requests have sampling of their own, and log-probabilities. Before the engine is made."""
    own = [
        logprobs := Logprobs(),
        ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)),
        Truncation(),
        SeededNoise(),
    ]
    processors.logits_processor.extend(own)
    processors.tensors_required += len(own)
    processors.do_processing = True
    return logprobs


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _MIX1
    bits = (bits ^ _shifted(bits, 27)) * _MIX2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
