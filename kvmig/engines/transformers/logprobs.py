"""Log-probabilities of tokens, by the model's own scores: before temperature and truncation."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
)

from kvmig.engines.transformers.payload import Logprob

LEAST = -9999.0
"""JSON has no infinity."""


class Logprobs(ContinuousBatchingLogitsProcessor):
    """Comes first among the processors, changes nothing, and keeps what requests ask for."""

    supported_kwargs: dict[str, type] = {"logprobs": int}  # noqa: RUF012 - as the base has it
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        """Request -> its row of `_found`."""
        self._rows: list[int] = []
        self._found: torch.Tensor | None = None

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        """None are needed."""
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

    def of(self, request_id: str, token: int, top: int) -> Logprob:
        """Of the last step's token, and of the `top` likeliest. Raises KeyError."""
        assert self._found is not None
        row = self._found[self._places[request_id]]
        values, ids = row.topk(min(top, row.numel()))
        return Logprob(
            max(float(row[token]), LEAST),
            ids.tolist(),
            [max(value, LEAST) for value in values.tolist()],
        )
