"""top_k, top_p and min_p: which tokens a request that samples can get at all."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

Limits = tuple[int, float, float]
"""top_k (0: all), top_p, min_p."""


class Truncation(ContinuousBatchingLogitsProcessor):
    """Of the rows that ask for it only: to sort a vocabulary takes its time.

    transformers' own sort all rows, and would do so in every step.
    """

    supported_kwargs: dict[str, type] = {"truncation": tuple}  # noqa: RUF012 - as the base has it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._limits: list[Limits] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """None are needed."""
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
