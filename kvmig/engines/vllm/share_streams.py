"""vLLM's steps and graphs on the streams of `kvmig.engines.shares`.

A step runs where the thread's current stream is, except what was captured into a graph, which
keeps the SMs of the stream that it was captured on. So graphs are captured for batches of decodes
alone (vLLM's FULL_DECODE_ONLY), on the stream of decodes; all other steps are launched kernel by
kernel, on the stream of their share. The steps of two streams never overlap: each waits for what
the engine's own stream has, and that one for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import parallel_state

from kvmig.core.config import UnitConfig
from kvmig.engines.gate import ComputeShares
from kvmig.engines.shares import SmShares, open_shares
from kvmig.engines.vllm import worker
from kvmig.kernels import driver
from kvmig.kernels.driver import CudaDriver

if TYPE_CHECKING:
    from kvmig.engines.vllm.core import StepCore

NO_SMS = "a CPU has no SMs"


@contextmanager
def streams_for(config: VllmConfig, unit: UnitConfig | None) -> Iterator[ShareStreams | str]:
    """The streams of an engine that is made meanwhile, in this process, or why it has none, in a
    few words; empty: it wants none. Closed if it fails.

    Raises ConfigError for a share that this GPU is too small for.
    """
    if unit is None or unit.shares is None:
        yield ""
        return
    if config.device_config.device_type != "cuda":
        yield NO_SMS
        return
    wanted = ComputeShares(*unit.shares)
    shares = open_shares(CudaDriver(driver.current_device()), wanted, unit.path)
    if isinstance(shares, str):
        yield shares
        return
    try:
        streams = ShareStreams(shares, wanted)
        with streams.capturing(config):
            yield streams
    except BaseException:
        shares.close()
        raise


class ShareStreams:
    """One engine's, for as long as its graphs live."""

    def __init__(self, shares: SmShares, wanted: ComputeShares) -> None:
        self._shares = shares
        self._streams = {
            parts: torch.cuda.ExternalStream(stream.handle)
            for parts, stream in shares.streams.items()
        }
        self._decodes = self._streams.get(wanted.decode)

    @contextmanager
    def capturing(self, config: VllmConfig) -> Iterator[None]:
        """An engine that is made meanwhile captures its graphs under the share of decodes."""
        compilation = config.compilation_config
        if compilation.cudagraph_mode is not CUDAGraphMode.NONE:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
        if self._decodes is None:
            yield
            return
        real, decodes = parallel_state.GraphCaptureContext, self._decodes
        with patch.object(parallel_state, "GraphCaptureContext", lambda _: real(decodes)):
            yield

    @contextmanager
    def step(self, core: StepCore, parts: int) -> Iterator[None]:
        """Let what is launched meanwhile on the engine's thread take `parts` parts; 0: all."""
        mine = self._streams.get(parts)
        if mine is None:
            yield
            return
        own = torch.cuda.current_stream()
        mine.wait_stream(own)
        core.model_executor.collective_rpc(worker.compute_on, args=(mine,))
        try:
            with torch.cuda.stream(mine):
                yield
        finally:
            core.model_executor.collective_rpc(worker.compute_on, args=(own,))
            own.wait_stream(mine)

    def close(self) -> None:
        """Once the engine has ended: give the SMs back."""
        self._shares.close()
