"""Forbidden words are forbidden as by vLLM, with one write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.sample.ops.bad_words import _apply_bad_words_single_batch as one_by_one

from kvmig.engines.vllm.bad_words import forbid

pytestmark = pytest.mark.engine
VOCABULARY = 12
TOKENS = st.integers(0, VOCABULARY - 1)


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=20), st.lists(TOKENS, max_size=4)
)
def test_the_same_tokens_are_forbidden(words: list[list[int]], past: list[int]) -> None:
    logits, expected = torch.zeros(VOCABULARY), torch.zeros(VOCABULARY)
    one_by_one(expected, words, past)
    forbid(logits, words, past)
    assert torch.equal(logits, expected)


class Counting(TorchDispatchMode):
    """Counts operations on tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_128_words_take_no_more_operations_than_one() -> None:
    words = [[one] for one in range(128)]
    with Counting() as counted:
        forbid(torch.zeros(128), words, [])
    assert counted.count < 6
