"""A vLLM engine for a program of one's own: requests in token ids, several engines a process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.config import VllmConfig

from kvmig.core.errors import ConfigError
from kvmig.engines.base import Frame, Frames
from kvmig.engines.vllm.front import decode_outputs
from kvmig.engines.vllm.migration import encode_request, token_request
from kvmig.engines.vllm.serving import ServingVllm

_STEPS = threading.RLock()
"""vLLM keeps what a step works on (forward context, workspaces, a CPU's scratch buffer) once a
process, not once a thread or engine: the engines of a process start and step in turns."""


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one step for one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: str
    """Empty while it runs."""


class EmbeddedVllm(ServingVllm):
    """Implements `kvmig.testing.subject.EngineUnderTest`."""

    def __init__(self, config: VllmConfig) -> None:
        """Load the model: minutes. Raises ConfigError."""
        if config.kv_transfer_config is not None:
            raise ConfigError(
                "--kv-offloading-size can't be used by engines in one's own process, leave it out:"
                " vLLM has one connector a process"
            )
        with _STEPS:
            super().__init__(config)
            self._core.stepping = _STEPS

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """A payload for `submit`, of a request that only `max_tokens` ends; greedy without seed.

        Any other `SamplingParams`: `kvmig.engines.vllm.migration.encode_request`.
        """
        params = SamplingParams(
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        return list(encode_request(token_request("", prompt, params)))

    def decode_outputs(self, frames: Frames) -> list[Output]:
        """The outputs that `connect`'s `on_outputs` got."""
        return [
            Output(
                one.request_id,
                list(one.new_token_ids),
                "" if one.finish_reason is None else str(one.finish_reason),
            )
            for one in decode_outputs(frames).outputs
        ]
