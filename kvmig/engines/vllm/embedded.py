"""A vLLM engine for a program of one's own: requests in token ids, several engines a process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vllm import SamplingParams
from vllm.config import VllmConfig

from kvmig.core.errors import ConfigError, StartupError, WeightsInUse
from kvmig.engines.base import Frame, Frames
from kvmig.engines.vllm.config import identity_of_config
from kvmig.engines.vllm.front import decode_outputs
from kvmig.engines.vllm.migration import encode_request, token_request
from kvmig.engines.vllm.serving import ServingVllm
from kvmig.engines.vllm.worker import renew_tied_heads

_STEPS = threading.RLock()
"""vLLM keeps what a step works on (forward context, workspaces, a CPU's scratch buffer) once a
process, not once a thread or engine: the engines of a process start and step in turns."""
_SETTLE_S = 10.0
"""How long an engine may take to be rid of requests that have ended."""
_LOOK_S = 0.005


@dataclass(frozen=True, slots=True)
class EmbeddedOutput:
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
                "--kv-offloading-size and --kv-transfer-config can't be used by engines in one's"
                " own process, leave them out: vLLM has one connector a process"
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

    def decode_outputs(self, frames: Frames) -> list[EmbeddedOutput]:
        """The outputs that `connect`'s `on_outputs` got."""
        return [
            EmbeddedOutput(
                one.request_id,
                list(one.new_token_ids),
                "" if one.finish_reason is None else str(one.finish_reason),
            )
            for one in decode_outputs(frames).outputs
        ]

    async def load_weights(self, source: Path) -> str:
        """source: the folder of a checkpoint of the same shape, which vLLM reads in place.

        Equal checkpoints give equal identities, at a start, too. See
        `kvmig.engines.base.TrainableEngine`.
        """
        _check_folder(source)
        if self._incoming.submitted or self._incoming.entering:
            raise WeightsInUse("it has requests")
        identify = partial(identity_of_config, self._core.vllm_config, str(source))
        self._incoming.hold()
        try:
            weights = await asyncio.to_thread(identify)
            await self._settled()
        except BaseException:
            self._incoming.let_in()
            raise
        await self._on_engine(partial(self._read_weights, source))
        if await asyncio.to_thread(identify) != weights:
            raise StartupError(f"the weights in {source} were replaced meanwhile: load them again")
        self._identify, self._weights = identify, weights
        self._reweigh(weights)
        if self._own.canary:
            await super().warm_up()  # rounding is shown by what the new weights compute
        self._incoming.let_in()
        return weights

    async def _settled(self) -> None:
        """Wait until nothing of requests that have ended is in the engine; no others may come."""
        deadline = time.monotonic() + _SETTLE_S
        while not await self._on_engine(self._forget_blocks):
            if self._incoming.submitted or time.monotonic() > deadline:
                raise WeightsInUse("it has requests")
            await asyncio.sleep(_LOOK_S)

    # -- on the engine's thread

    def _forget_blocks(self) -> bool:
        """Forget all KV, if no request has any."""
        core = self._core
        core.collect()
        busy = core.scheduler.has_requests() or core.batch_queue or self._destination.arriving()
        return not busy and core.reset_prefix_cache()

    def _read_weights(self, source: Path) -> None:
        with _STEPS:
            self._core.model_executor.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(source)}
            )
        self._core.model_executor.collective_rpc(renew_tied_heads)
        self._core.reset_encoder_cache()


def _check_folder(source: Path) -> None:
    if not source.is_dir():
        raise ConfigError(f"source is {str(source)!r}, must be a folder")
