"""Words that a call forbids take one write into a step's logits, and not one for each word.

Model runner V1 of vLLM writes for each of 128 words of each sequence, in each step of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.ops import bad_words


def write_once(worker: Any) -> None:
    """Take the place of vLLM's function, in a worker with model runner V1."""
    bad_words._apply_bad_words_single_batch = forbid


def forbid(logits: torch.Tensor, words: Sequence[list[int]], past: list[int]) -> None:
    """Mask the bad words of one sequence, in place of vLLM's. words, past: in tokens."""
    ends = [word[-1] for word in words if would_end(word, past)]
    if ends:
        logits.index_fill_(0, async_tensor_h2d(ends, device=logits.device), float("-inf"))


def would_end(word: list[int], past: list[int]) -> bool:
    """Whether the next token can be the word's last one."""
    before = len(word) - 1
    return not before or (before <= len(past) and past[-before:] == word[:-1])
