"""A prompt's log-probabilities never take the memory of all its tokens' logits at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvmig.engines.vllm import prompt_logprobs
from kvmig.engines.vllm.prompt_logprobs import compute_in_parts

pytestmark = pytest.mark.engine
VOCABULARY, WIDTH, TOKENS, COUNT = 50, 8, 20, 3


class Model:
    """Notes for how many tokens logits are asked at once."""

    def __init__(self) -> None:
        self.head = torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1))
        self.rows: list[int] = []

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.head


def runner(mode: str) -> Any:
    """What vLLM's own function reads of a runner, for one prompt that comes in one step."""
    made = SimpleNamespace(
        model=Model(), sampler=Sampler(), device=torch.device("cpu"),
        model_config=SimpleNamespace(logprobs_mode=mode), num_prompt_logprobs={"r": COUNT},
        requests={"r": SimpleNamespace(
            prompt_token_ids=list(range(TOKENS)), in_progress_prompt_logprobs_cpu=None,
            num_computed_tokens=0,
        )},
        input_batch=SimpleNamespace(req_id_to_index={"r": 0}),
        query_start_loc=SimpleNamespace(np=torch.zeros(1, dtype=torch.int32).numpy()),
        _sync_device=lambda: None,
    )  # fmt: skip
    made._get_prompt_logprobs_dict = GPUModelRunner._get_prompt_logprobs_dict.__get__(made)
    return made


def logprobs_of(made: Any) -> LogprobsTensors:
    hidden = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    found = made._get_prompt_logprobs_dict(hidden, {"r": TOKENS})["r"]
    assert isinstance(found, LogprobsTensors)
    return found


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_logits_are_there_for_a_part_of_a_prompt_only_and_nothing_else_changes(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = runner(mode)
    expected = logprobs_of(whole)
    assert whole.model.rows == [TOKENS - 1]
    monkeypatch.setattr(prompt_logprobs, "ROWS", 6)
    parts = runner(mode)
    model = parts.model
    compute_in_parts(SimpleNamespace(model_runner=parts))
    found = logprobs_of(parts)
    assert model.rows == [6, 6, 6, 1]
    assert torch.equal(found.logprob_token_ids, expected.logprob_token_ids)
    assert torch.allclose(found.logprobs, expected.logprobs)
    assert torch.equal(found.selected_token_ranks, expected.selected_token_ranks)
    assert parts.model is model
    assert isinstance(parts.sampler, Sampler)
