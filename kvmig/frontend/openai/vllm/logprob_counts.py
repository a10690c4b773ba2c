"""How many log-probabilities a front end makes on its event loop."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.outputs import RequestOutput

MANY = 512
"""Log-probabilities of an answer, or of a chunk, that are made on the event loop: some 5 ms."""


def logprobs_in(outputs: Sequence[RequestOutput]) -> int:
    """Log-probabilities of an answer, roughly."""
    lists = [one.prompt_logprobs for one in outputs]
    lists += [answer.logprobs for one in outputs for answer in one.outputs]
    return sum(len(one) * len(one[-1] or ()) for one in lists if one)
