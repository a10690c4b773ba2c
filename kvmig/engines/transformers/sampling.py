"""Sampling that can move: a token depends on its request's seed and its position alone.

transformers draws all requests' tokens from one generator, so what one gets depends on who
else is in the batch. Here the engine takes the largest score always, and requests that sample
get Gumbel noise added to theirs first, which comes to the same (Gumbel-max: the argmax of
`scores + noise` is distributed as softmax of the scores). The noise is a hash of seed, position
and token, so there is no state that a migration would have to carry.

In this order: `LogprobRecorder` (of the model's own scores), temperature, `TruncationProcessor`,
`SeededNoise`.
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

from kvmig.engines.transformers.payload import TokenLogprob

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants, as signed numbers."""
LEAST = -9999.0
"""JSON has no infinity."""
Limits = tuple[int, float, float]
"""top_k (0: all), top_p, min_p."""


def add_sampling(processors: ContinuousBatchingLogitsProcessorList) -> LogprobRecorder:
    """Let requests have sampling of their own, and log-probabilities. Before the engine is made."""
    own = [
        logprobs := LogprobRecorder(),
        ContinuousBatchingTemperatureLogitsWarper(TemperatureLogitsWarper(1.0)),
        TruncationProcessor(),
        SeededNoise(),
    ]
    processors.logits_processor.extend(own)
    processors.tensors_required += len(own)
    processors.do_processing = True
    return logprobs


class LogprobRecorder(ContinuousBatchingLogitsProcessor):
    """Comes first among the processors, changes nothing, and keeps what requests ask for."""

    supported_kwargs: dict[str, type] = {"logprobs": int}  # noqa: RUF012 - as the base has it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        """Request -> its row of `_found`."""
        self._rows: list[int] = []
        self._found: torch.Tensor | None = None

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Clear the tensor: no defaults are needed."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Which rows of the step's scores are asked for."""
        self._places, self._rows, self._found = {}, [], None
        for row, request in enumerate(requests_with_new_token):
            if "logprobs" in request.state.logit_processor_kwargs:
                self._places[request.state.request_id] = len(self._rows)
                self._rows.append(row)
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """scores [n, vocabulary], as they are."""
        if self._rows:
            self._found = scores[self._rows].log_softmax(-1)
        return scores

    def logprob_of(self, request_id: str, token: int, top: int) -> TokenLogprob:
        """Scores of the last step's token and of the `top` likeliest. Raises KeyError."""
        assert self._found is not None
        row = self._found[self._places[request_id]]
        values, ids = row.topk(min(top, row.numel()))
        return TokenLogprob(
            max(float(row[token]), LEAST),
            ids.tolist(),
            [max(value, LEAST) for value in values.tolist()],
        )


class TruncationProcessor(ContinuousBatchingLogitsProcessor):
    """Applies top_k, top_p and min_p to the rows that ask for it only.

    To sort a vocabulary takes its time; transformers' own sort all rows, in every step.
    """

    supported_kwargs: dict[str, type] = {"truncation": tuple}  # noqa: RUF012 - as the base has it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._limits: list[Limits] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """Clear the tensor: no defaults are needed."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        """Which rows of the step's scores are truncated, and how."""
        self._rows, self._limits = [], []
        for row, request in enumerate(requests_with_new_token):
            limits = request.state.logit_processor_kwargs.get("truncation")
            if limits is not None:
                self._rows.append(row)
                self._limits.append(limits)
        return torch.empty(0, dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        """scores [n, vocabulary], of tempered scores; -inf for tokens that can't be had."""
        if self._rows:
            scores = scores.clone()
            scores[self._rows] = truncated(scores[self._rows], self._limits)
        return scores


def truncated(scores: torch.Tensor, limits: list[Limits]) -> torch.Tensor:
    """scores [n, vocabulary], limits [n]. The likeliest token always stays.

    Example: probabilities 0.5, 0.3, 0.2. top_k 2 leaves the first two; so does top_p 0.6, for the
    first has less, and min_p 0.5, half of 0.5 being more than 0.2.
    """
    top_k, top_p, min_p = (
        torch.tensor(column, device=scores.device).unsqueeze(-1)
        for column in zip(*limits, strict=True)
    )
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.size(-1), device=scores.device)
    ordered = ordered.masked_fill((top_k > 0) & (places >= top_k), -torch.inf)
    shares = ordered.softmax(-1)
    likelier = shares.cumsum(-1) - shares
    gone = ((likelier >= top_p) | (shares < min_p * shares[:, :1])) & (places > 0)
    return torch.full_like(scores, -torch.inf).scatter(
        -1, order, ordered.masked_fill(gone, -torch.inf)
    )


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


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _MIX1
    bits = (bits ^ _shifted(bits, 27)) * _MIX2
    return bits ^ _shifted(bits, 31)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift bits to the right; zeros come from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
