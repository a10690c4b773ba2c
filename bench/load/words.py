"""How front ends of each kind ask for tokens, and get them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from bench.load.pace import TOKEN, Given
from kvmig.engines.base import Frame

MAX_TOKENS = 8192
"""Of a request."""
BLOCK_TOKENS = 32
TASKS = ("generate",)
"""What the engine can do, in vLLM's words."""


class Words(Protocol):
    """Of one kind of front end."""

    def tokens(self, payload: Sequence[Frame]) -> int:
        """How many a request wants."""
        ...

    def say(self, given: Sequence[Given]) -> list[Frame]:
        """What a step gave."""
        ...

    def answer(self, call_id: int, method: str) -> list[Frame]:
        """Of a call of an engine method, which does nothing."""
        ...

    def describe(self) -> bytes:
        """What a front end must know of the engine."""
        ...


class VllmWords:
    """vLLM's own structs and encoder."""

    def __init__(self) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder()

    def request(self, payload: Sequence[Frame]) -> Any:
        """An EngineCoreRequest."""
        return self._decoder.decode([bytes(frame) for frame in payload])

    def tokens(self, payload: Sequence[Frame]) -> int:
        wanted: int = self.request(payload).sampling_params.max_tokens
        return wanted

    def say(self, given: Sequence[Given]) -> list[Frame]:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        outputs = [
            EngineCoreOutput(
                one.request_id, [TOKEN], finish_reason=FinishReason.LENGTH if one.last else None
            )
            for one in given
        ]
        return list(self._encoder.encode(EngineCoreOutputs(outputs=outputs)))

    def utility(self, call_id: int, method: str) -> Any:
        """A UtilityOutput."""
        from vllm.v1.engine import UtilityOutput
        from vllm.v1.serial_utils import UtilityResult

        result = TASKS if method == "get_supported_tasks" else None
        return UtilityOutput(call_id, result=UtilityResult(result))

    def answer(self, call_id: int, method: str) -> list[Frame]:
        return list(self._encoder.encode(self.utility(call_id, method)))

    def describe(self) -> bytes:
        return msgspec.msgpack.encode((self.ready(), TASKS))

    def ready(self) -> Any:
        """What vLLM's engine core tells vLLM's front end: an EngineCoreReadyResponse."""
        from vllm.v1.engine import EngineCoreReadyResponse

        return EngineCoreReadyResponse(
            max_model_len=MAX_TOKENS,
            num_gpu_blocks=1 << 20,
            block_size=BLOCK_TOKENS,
            dp_stats_address=None,
            dtype="bfloat16",
            vllm_version="stub",
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=0,
            max_num_seqs=1 << 14,
            max_num_batched_tokens=1 << 14,
            instance_id="stub",
            supports_lora=False,
            max_loras=0,
        )


class TransformersWords:
    """Those of `kvmig.engines.transformers`."""

    def tokens(self, payload: Sequence[Frame]) -> int:
        from kvmig.engines.transformers.payload import SubmittedRequest, decode

        return decode(payload[0], SubmittedRequest).max_tokens

    def say(self, given: Sequence[Given]) -> list[Frame]:
        from kvmig.engines.transformers.payload import StepOutput, encode

        return [
            encode(
                [StepOutput(one.request_id, [TOKEN], "length" if one.last else "") for one in given]
            )
        ]

    def answer(self, call_id: int, method: str) -> list[Frame]:
        return []

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(
            {"block_tokens": BLOCK_TOKENS, "max_request_tokens": MAX_TOKENS}
        )


def words_of(engine: str) -> Words:
    """engine: one of `kvmig.core.config.ENGINES`."""
    return TransformersWords() if engine == "transformers" else VllmWords()
