"""A front end's way from engines' outputs to vLLM's streams: clocks, failures, output processor.

What goes wrong with one request ends that request only. In vLLM any exception in its output
processor ends the task that hands out all streams, and with it the server.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from http import HTTPStatus
from operator import length_hint
from typing import Any

import torch
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.outputs import PoolingOutput, PoolingRequestOutput, RequestError, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from kvmig.core.errors import Failure
from kvmig.engines.vllm.late_logprobs import leave_for_later

logger = logging.getLogger(__name__)

ANOTHER_CLOCK_S = 10.0
"""Delay beyond any before at which an output is taken to be of another clock: the instance
has been started again elsewhere."""


class CarefulOutputs(OutputProcessor):
    """`OutputProcessor`, for an AsyncLLM."""

    def add_request(self, request: EngineCoreRequest, *args: Any, **options: Any) -> None:
        super().add_request(request, *args, **options)
        leave_for_later(self.request_states[request.request_id])

    def process_outputs(
        self, engine_core_outputs: Sequence[EngineCoreOutput], *args: Any, **options: Any
    ) -> OutputProcessorOutput:
        for output in engine_core_outputs:
            if output.finish_reason is FinishReason.ERROR:
                self._fail_pooling(output)
        left = iter(engine_core_outputs)
        ended: list[str] = []
        while True:
            try:
                processed = super().process_outputs(left, *args, **options)
            except Exception as error:
                done = engine_core_outputs[: len(engine_core_outputs) - length_hint(left)]
                if not done:  # nobody's output: the next one would fail in the same way
                    raise
                self._fail(done[-1].request_id, error)
                ended += [one.request_id for one in done if self._ended_here(one)]
            else:
                processed.reqs_to_abort += ended
                return processed

    def propagate_error(self, e: Exception) -> None:
        """The handler has failed between two batches, and goes on: no stream lacks anything."""

    def _fail(self, request_id: str, error: Exception) -> None:
        """Give the error to the request's own task, which aborts the request everywhere."""
        logger.error("request %s failed: %r", request_id, error, exc_info=error)
        state = self.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    def _ended_here(self, output: EngineCoreOutput) -> bool:
        """Whether a stop string ended it, so that the engine is to be informed."""
        return not output.finished and output.request_id not in self.request_states

    def _fail_pooling(self, output: EngineCoreOutput) -> None:
        """vLLM takes an output without a tensor for one with tokens, for any request."""
        state = self.request_states.get(output.request_id)
        if state is None or state.detokenizer is not None:
            return
        self._end(state)
        if state.queue is not None:
            state.queue.put(
                PoolingRequestOutput(
                    request_id=state.external_req_id,
                    outputs=PoolingOutput(torch.empty(0)),
                    prompt_token_ids=state.prompt_token_ids or [],
                    num_cached_tokens=0,
                    finished=True,
                    error=pooling_failure(output.stop_reason),
                )
            )

    def _end(self, state: RequestState) -> None:
        self.lora_states.request_finished(state.request_id, state.lora_name)
        self._finish_request(state)


class EngineClocks:
    """Times of many engines, by index, on this front end's clock.

    vLLM's statistics subtract an engine's monotonic times from each other. A request that moves
    has times of several engines, and those of two machines have nothing to do with each other.
    The output that came fastest shows how an engine's clock differs from ours.
    """

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def step(self, index: int, told: float, now: float) -> float:
        """A step ended at `told` on the engine's clock, and came at `now`: when it ended on ours.

        Never before the step before it.
        """
        ahead = now - told
        known = self._ahead.get(index)
        if known is None or not known <= ahead <= known + ANOTHER_CLOCK_S:
            self._ahead[index] = ahead
        ended = max(self.here(index, told), self._last.get(index, now - ANOTHER_CLOCK_S))
        self._last[index] = ended
        return ended

    def here(self, index: int, told: float) -> float:
        """A time on the engine's clock, on ours."""
        return told + self._ahead.get(index, 0.0)


class QuotaError(GenerationError):
    """The key's quota is used up. vLLM's handlers answer with its status."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.TOO_MANY_REQUESTS


class RefusedError(GenerationError):
    """The request asks for what it may not have. vLLM's handlers answer with its status."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.status_code = HTTPStatus.BAD_REQUEST


_KINDS: dict[str, Callable[[str], Exception]] = {
    "retry": RetryableRequestError,
    "final": GenerationError,
    "quota": QuotaError,
    "refused": RefusedError,
}
"""Answered with 503, 500, 429 and 400, in a stream as OpenAI's error object."""


def failure(reason: str, kind: Failure) -> str:
    """The stop reason of a failed output, by which vLLM's HTTP handlers know why.

    vLLM passes an output's stop reason on, and answers any `error` with "Internal server error".
    """
    return f"{kind}: {reason}"


def has_failed(output: RequestOutput) -> bool:
    """Whether one of the sequences has."""
    for one in output.outputs:  # noqa: SIM110 - for each token, and `any` takes twice as long
        if one.finish_reason == "error":
            return True
    return False


def before_failure(output: RequestOutput) -> RequestOutput | None:
    """What came before sequences failed, if anything did: vLLM merges what is still unread."""
    failed = [one for one in output.outputs if one.finish_reason == "error"]
    if not any(one.token_ids for one in failed):
        return None
    before = copy(output)
    before.finished = False
    before.outputs = [copy(one) for one in output.outputs]
    for one in before.outputs:
        if one.finish_reason == "error":
            one.finish_reason = one.stop_reason = None
    return before


def check_failure(output: RequestOutput) -> None:
    """Raise vLLM's error with its message if one of the sequences has failed."""
    for one in output.outputs:
        if one.finish_reason == "error" and isinstance(one.stop_reason, str):
            kind, _, reason = one.stop_reason.partition(": ")
            raise _KINDS[kind](reason)


def pooling_failure(stop_reason: int | str | None) -> RequestError:
    """Raise the same for a request without sequences; without a message the engine refused it."""
    if not isinstance(stop_reason, str):
        return RequestError("failed", "Internal server error")
    kind, _, reason = stop_reason.partition(": ")
    return RequestError("failed", reason, retryable=kind == "retry")
