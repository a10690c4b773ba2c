"""Parameters of requests, repeated for their drafts."""

from __future__ import annotations

import pytest
import torch

from kvmig.engines.vllm.worker import repeat_for_drafts


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_value_is_repeated_for_its_drafts_in_every_type(dtype: torch.dtype) -> None:
    output = torch.full((3,), 99, dtype=dtype)
    values = torch.tensor([5, 7, 6], dtype=dtype)
    repeat_for_drafts(output, values, torch.tensor([2, 2, 3], dtype=torch.int32), 6, 1)
    assert output.tolist() == [5, 5, 1]
