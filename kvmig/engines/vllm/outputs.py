"""vLLM's output processor, made so that what goes wrong with one request ends that request only.

In vLLM any exception there ends the task that hands out all streams, and with it the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import length_hint
from typing import Any

import torch
from vllm.outputs import PoolingOutput, PoolingRequestOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput, RequestState

from kvmig.engines.vllm import failures

logger = logging.getLogger(__name__)


class CarefulOutputs(OutputProcessor):
    """`OutputProcessor`, for an AsyncLLM."""

    def process_outputs(
        self, engine_core_outputs: Sequence[EngineCoreOutput], *args: Any, **options: Any
    ) -> OutputProcessorOutput:
        """As vLLM's; a request whose output raises gets the error, the others their outputs."""
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
        """Its own task hears of the error, and aborts it everywhere."""
        logger.error("request %s failed: %r", request_id, error, exc_info=error)
        state = self.request_states.get(request_id)
        if state is not None and state.queue is not None:
            state.queue.put(error)

    def _ended_here(self, output: EngineCoreOutput) -> bool:
        """Whether a stop string ended it, and the engine is to hear of that."""
        return not output.finished and output.request_id not in self.request_states

    def _fail_pooling(self, output: EngineCoreOutput) -> None:
        """vLLM takes an output without a tensor for one with tokens, whatever its request."""
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
                    error=failures.of_pooling(output.stop_reason),
                )
            )

    def _end(self, state: RequestState) -> None:
        self.lora_states.request_finished(state.request_id, state.lora_name)
        self._finish_request(state)
