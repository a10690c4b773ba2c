"""Prompts' log-probabilities, a part of a step's tokens at a time.

Model runner V1 of vLLM has the logits of all of a prompt's tokens in a step at once, in 32 bits and
twice: with 8,192 tokens and a vocabulary of 128,256 that is 8 GB, of which no profile of the
engine's memory knows, for one call. Runner V2 computes them in parts itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

ROWS = 256
"""Tokens at a time."""


class _Rows(NamedTuple):
    """Hidden states, in place of the logits and scores that are computed from them."""

    hidden: torch.Tensor

    def to(self, dtype: torch.dtype) -> _Rows:
        """Stay as they are: they become scores in `_gather`."""
        return self


def compute_in_parts(worker: Any) -> None:
    """Take the place of vLLM's functions, in a worker with model runner V1."""
    runner: RunnerV1 = worker.model_runner
    whole = runner._get_prompt_logprobs_dict

    def in_parts(hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        if not runner.num_prompt_logprobs:
            return {}
        model, sampler = runner.model, runner.sampler

        def gather(rows: _Rows, count: int, targets: torch.Tensor) -> LogprobsTensors:
            return _gather(runner, model, sampler, rows.hidden, count, targets)

        runner.model = SimpleNamespace(compute_logits=_Rows)
        runner.sampler = SimpleNamespace(compute_logprobs=lambda rows: rows, gather_logprobs=gather)
        try:
            found: dict[str, Any] = whole(hidden, scheduled)
            return found
        finally:
            runner.model, runner.sampler = model, sampler

    runner._get_prompt_logprobs_dict = in_parts


def _gather(
    runner: RunnerV1, model: Any, sampler: Any, hidden: torch.Tensor, count: int,
    targets: torch.Tensor,
) -> LogprobsTensors:  # fmt: skip
    """Scores of the likeliest `count` tokens, and of the targets, at each of these positions."""
    raw = runner.model_config.logprobs_mode in ("raw_logits", "processed_logits")
    parts = []
    for at in range(0, len(hidden), ROWS):
        logits = model.compute_logits(hidden[at : at + ROWS])
        scores = logits.to(torch.float32) if raw else sampler.compute_logprobs(logits)
        parts.append(sampler.gather_logprobs(scores, count, targets[at : at + ROWS]))
    ids, likelihoods, ranks = (torch.cat([one[field] for one in parts]) for field in range(3))
    return LogprobsTensors(ids, likelihoods, ranks)
