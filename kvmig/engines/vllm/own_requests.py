"""What an engine runs for kvmig itself: the warm-up, a probe of its numerics, and measurements of
its step times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest

from kvmig.core.errors import NotParked
from kvmig.engines.base import StepTime
from kvmig.engines.vllm.building import RequestBuilder
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.incoming import IncomingRequests
from kvmig.engines.vllm.migration import encode_request
from kvmig.engines.vllm.warmup import (
    OutputProbe,
    StepTimes,
    profile_path,
    read_profile,
    takes_own_requests,
    warm_up_requests,
    write_profile,
)

_WARM_UP_TIMEOUT_S = 300.0
OWN_CLIENT = 0
"""The client for which these requests are submitted."""


class OwnRequests:
    """Submits kvmig's own requests to one engine and takes their outputs; on the event loop."""

    def __init__(
        self,
        core: StepCore,
        incoming: IncomingRequests,
        builder: RequestBuilder,
        on_engine: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        """on_engine: runs something on the engine's thread, between two steps."""
        self.canary = ""
        """What the probe showed at the start; empty: none is possible."""
        self._core = core
        self._incoming = incoming
        self._builder = builder
        self._on_engine = on_engine
        self._warming: dict[str, asyncio.Future[None]] = {}
        self._probe: OutputProbe | None = None
        self._measuring: StepTimes | None = None

    def take_outputs(self, outputs: EngineCoreOutputs) -> bool:
        """Take outputs of `OWN_CLIENT`; whether they belong to one of these requests."""
        if self._warming:
            for output in outputs.outputs:
                if self._probe is not None:
                    self._probe.add_output(output)
                if output.finished and output.request_id in self._warming:
                    self._warming[output.request_id].set_result(None)
                    self._incoming.forget(output.request_id)
            return True
        if self._measuring is not None:
            self._measuring.add_outputs(outputs)
            return True
        return False

    async def probe(self) -> str:
        """How the engine rounds; empty: no probe shows it. `compare` compares with it.

        On a GPU a probe shows only whether this very engine still computes the same, and only if
        its kernels round in one way each time: it is run twice there, where the engine may sleep.
        """
        config = self._core.vllm_config
        if OutputProbe.possible(config):
            self.canary = await self._probed()
            return self.canary
        if OutputProbe.repeatable(config):
            first = await self._probed()
            await self._on_engine(self._forget_prefixes)
            self.canary = first if await self._probed() == first else ""
            await self._on_engine(self._forget_prefixes)
        return ""

    def _forget_prefixes(self) -> None:
        """Else the same prompt is computed by other steps the next time."""
        self._core.reset_prefix_cache()

    async def warm_up(self) -> None:
        """Run each kind of request once."""
        await self._warm(warm_up_requests(self._core.vllm_config))

    async def compare(self) -> None:
        """Run the probe again. Raises NotParked if the engine computes otherwise than at its
        start."""
        found = await self._probed()
        if found != self.canary:
            raise NotParked(f"it computes {found} where it computed {self.canary} at its start")

    async def step_times(self, capacity: int, limit_s: float) -> list[StepTime]:
        """Measured now, or by an earlier start of such an engine; none for one that can't run such
        requests.

        capacity: of the KV cache, in tokens.
        """
        config = self._core.vllm_config
        if not takes_own_requests(config):
            return []
        path = profile_path(config, capacity)
        times = read_profile(path)
        if not times:
            times = await self._measure(capacity, limit_s)
            write_profile(path, times)
        return times

    async def _measure(self, capacity: int, limit_s: float) -> list[StepTime]:
        measuring = self._measuring = StepTimes(self._core.vllm_config, capacity, self._submit)
        try:
            async with asyncio.timeout(limit_s):
                await measuring.ended.wait()
        except TimeoutError:
            pass  # what was found by then has to do
        finally:
            measuring.ended.set()
            self._incoming.abort(measuring.started)
            await self._builder.flush()
            await self._on_engine(lambda: None)
            self._measuring = None
        return measuring.found

    async def _probed(self) -> str:
        self._probe = probe = OutputProbe(self._core.vllm_config)
        try:
            await self._warm([probe.request])
        finally:
            self._probe = None
        return probe.digest()

    async def _warm(self, requests: Sequence[EngineCoreRequest]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            self._warming[request.request_id] = loop.create_future()
            self._submit(request)
        try:
            await asyncio.wait_for(asyncio.gather(*self._warming.values()), _WARM_UP_TIMEOUT_S)
        finally:
            # A cancelled future would break the delivery of a late output.
            self._incoming.abort([key for key, one in self._warming.items() if one.cancelled()])
            self._warming.clear()

    def _submit(self, request: EngineCoreRequest) -> None:
        self._incoming.submit(OWN_CLIENT, request.request_id, encode_request(request), own=True)
