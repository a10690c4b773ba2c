"""How long a decode step takes with so many tokens in the batch: measured on the warmed engine.

Before it serves: a batch grows, request by request, and runs some steps at each size.
Sequences have about 512 tokens, as real ones do, or more where the batch could not fill
the KV cache otherwise.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from statistics import quantiles

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from kvmig.engines.base import StepTime

STEPS = 24
"""Steps at each size; the lower quartile counts: others use the machine, too."""
USUAL_TOKENS = 512
GROWTH = 160
"""Tokens that a sequence may grow by while its batch does."""
FILLED = 0.8
"""Share of the KV cache that is filled at most: nothing may be preempted."""


def sizes(capacity: int, most_sequences: int, longest: int) -> tuple[list[int], int]:
    """(sequences in the batch at each size, tokens of each).

    capacity: of the KV cache, in tokens; longest: that a sequence may have.

    Example: 20,000 tokens and at most 16 sequences: 1, 2, 4, 8 and 11 of 1,250 tokens.
    """
    tokens = max(USUAL_TOKENS, capacity // most_sequences)
    tokens = max(min(tokens, longest - 2 * GROWTH, capacity // 4), 1)
    most = max(min(int(capacity * FILLED) // (tokens + GROWTH), most_sequences), 1)
    doubling = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*doubling, most], tokens


class StepTimes:
    """One measurement, from now on. `take` gets each step's outputs, on the event loop.

    `ended` is set when the largest batch has been measured, or from outside.
    """

    def __init__(
        self, config: VllmConfig, capacity: int, submit: Callable[[EngineCoreRequest], None]
    ) -> None:
        """capacity: of the KV cache, in tokens."""
        self.sizes, self.tokens = sizes(
            capacity, config.scheduler_config.max_num_seqs, config.model_config.max_model_len
        )
        self.started: list[str] = []
        self.found: list[StepTime] = []
        self.ended = asyncio.Event()
        self._vocabulary = config.model_config.get_vocab_size()
        self._submit = submit
        self._random = random.Random(1)  # nosec B311
        self._outputs: Counter[str] = Counter()
        self._last = 0.0
        self._steps: list[float] = []
        self._grow()

    def take(self, outputs: EngineCoreOutputs) -> None:
        """One step's outputs."""
        if self.ended.is_set():
            return
        emitted = [one.request_id for one in outputs.outputs if one.new_token_ids]
        whole = len(emitted) == len(self.started)
        if whole and all(self._outputs[one] for one in emitted) and self._last:
            self._steps.append((outputs.timestamp - self._last) * 1e3)
        self._last = outputs.timestamp if whole else 0.0
        self._outputs.update(emitted)
        if len(self._steps) < STEPS:
            return
        tokens = len(self.started) * self.tokens + self._outputs.total()
        self.found.append(StepTime(tokens, quantiles(self._steps)[0]))
        self._steps.clear()
        self._last = 0.0
        if len(self.started) == self.sizes[-1]:
            self.ended.set()
        else:
            self._grow()

    def _grow(self) -> None:
        wanted = next(size for size in self.sizes if size > len(self.started))
        while len(self.started) < wanted:
            request_id = f"kvmig-step-times-{len(self.started)}"
            self.started.append(request_id)
            self._submit(self._request(request_id))

    def _request(self, request_id: str) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=self._random.choices(range(self._vocabulary), k=self.tokens),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            # A salt of its own: these blocks must not serve as anybody's prefix.
            cache_salt="kvmig-step-times",
            data_parallel_rank=None,
        )
