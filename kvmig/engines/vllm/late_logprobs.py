"""Log-probabilities of long prompts become vLLM's objects on a thread.

vLLM's output processor makes an object of each of them on the event loop, which takes 5 µs each:
for a prompt of 1,500 tokens no stream gets a token for 0.15 s. Here a thread makes those of a long
prompt. The request's own task waits for them, and so all its outputs stay in their order.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState
from vllm.v1.outputs import LogprobsTensors

MANY = 512
"""Log-probabilities of a prompt that are made on the event loop: some 3 ms."""


class LatePromptLogprobs:
    """Stands for a prompt's log-probabilities, and makes them."""

    def __init__(self, maker: LogprobsProcessor, tensors: LogprobsTensors) -> None:
        self._maker = maker
        self._tensors: LogprobsTensors | None = tensors

    def make(self) -> Any:
        """vLLM's objects; the same ones each time."""
        if (tensors := self._tensors) is not None:
            self._maker._update_prompt_logprobs(tensors)
            self._tensors = None
        return self._maker.prompt_logprobs


class LateLogprobs(LogprobsProcessor):
    """vLLM's, of one request. It leaves many log-probabilities of a prompt for later."""

    def _update_prompt_logprobs(self, prompt_logprobs_tensors: LogprobsTensors) -> None:
        known: Any = vars(self)["prompt_logprobs"]
        if isinstance(known, LatePromptLogprobs):  # vLLM's engine hands over a prompt's at once
            self.prompt_logprobs = known.make()
        elif prompt_logprobs_tensors.logprobs.numel() > MANY:
            late: Any = LatePromptLogprobs(_like(self, LogprobsProcessor), prompt_logprobs_tensors)
            self.prompt_logprobs = late
            return
        super()._update_prompt_logprobs(prompt_logprobs_tensors)


class PromptLogprobsThread:
    """Makes the log-probabilities of a front end's prompts."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prompt-logprobs")

    async def make(self, logprobs: Any) -> Any:
        """What an output has of its prompt, once it is there."""
        if not isinstance(logprobs, LatePromptLogprobs):
            return logprobs
        return await asyncio.get_running_loop().run_in_executor(self._pool, logprobs.make)

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def leave_for_later(state: RequestState) -> None:
    """The request has just come, and has no output yet."""
    processor = state.logprobs_processor
    if processor is not None and processor.num_prompt_logprobs is not None:
        state.logprobs_processor = _like(processor, LateLogprobs)


def _like(processor: LogprobsProcessor, kind: type[LogprobsProcessor]) -> LogprobsProcessor:
    return kind(**{one.name: getattr(processor, one.name) for one in fields(LogprobsProcessor)})
