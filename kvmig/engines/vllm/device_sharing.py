"""What lets one engine share its device: memory that it can give and take, a share of a GPU's SMs,
and a gate before each of its steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from vllm.config import VllmConfig

from kvmig.core.config import UnitConfig
from kvmig.core.errors import UnsupportedLayout
from kvmig.engines.backing import CacheBacking, MadviseBacking, VmmBacking
from kvmig.engines.base import CacheSharing, EngineLoad
from kvmig.engines.gate import StepGate
from kvmig.engines.vllm.allocation import without_pages
from kvmig.engines.vllm.balloon import CacheBalloon, VllmSharing, unshared
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.phase import StepPhase
from kvmig.engines.vllm.share_streams import ShareStreams, streams_for
from kvmig.kernels.vmm import AddressRange


class DeviceSharing:
    """One engine's share of its device; of one that is alone there nothing is open."""

    def __init__(self, config: VllmConfig, unit: UnitConfig | None) -> None:
        """unit: see `kvmig.engines.kind.EnginePlugin.make`."""
        self.addresses: AddressRange | None = None
        """The addresses of a GPU's cache whose memory comes and goes."""
        self.streams: ShareStreams | str = ""
        """What its steps take of the SMs, or why they take all."""
        self.balloon: CacheBalloon | None = None
        self._config = config
        self._unit = unit

    @contextmanager
    def making(self) -> Iterator[None]:
        """An engine that is made meanwhile, in this process, can share the device."""
        config = self._config
        lazily = self._unit is not None and not unshared(config)
        device = config.device_config.device_type
        with (
            without_pages(device) if lazily else contextlib.nullcontext() as taken,
            streams_for(config, self._unit if lazily else None) as self.streams,
        ):
            yield
        self.addresses = None if taken is None else taken.addresses

    def open(
        self,
        core: StepCore,
        memory: BlockMemory,
        on_engine: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> CacheSharing | str:
        """Let the engine's KV cache shrink and grow, or return the reason why it can't.

        on_engine: runs something on the engine's thread, between two steps.
        """
        if self._unit is None:
            return "it is in no unit"
        backing = self._backing(core, memory)
        addresses = self.addresses
        if addresses is not None:
            addresses.driver.settle()  # vLLM's warm-up
            addresses.drop(addresses.pages)
            if isinstance(backing, str):
                addresses.put(addresses.pages)
            else:
                backing.take_pages([0])  # of the null block
        if isinstance(backing, str):
            return backing
        self.balloon = balloon = CacheBalloon(
            core.scheduler, memory.tables, backing, memory.copies, core.call
        )
        core.rest_s = balloon.rest_s
        unlimited = self.streams if isinstance(self.streams, str) else ""
        return VllmSharing(balloon, on_engine, partial(self.gate_steps, core), unlimited)

    def _backing(self, core: StepCore, memory: BlockMemory) -> CacheBacking | str:
        """What gives and takes the memory of the KV cache, or why there is none."""
        if why := unshared(core.vllm_config, memory.tables, memory.unmovable):
            return why
        try:
            if self.addresses is None:
                return MadviseBacking(memory.regions, memory.num_blocks)
            return VmmBacking(self.addresses, memory.regions, memory.num_blocks)
        except UnsupportedLayout as error:
            return str(error)

    def gate_steps(self, core: StepCore, gate: StepGate) -> None:
        """Ask `gate` before each step from now on; before the engine runs, or on its thread."""
        streams = self.streams
        if isinstance(streams, str):
            core.phase = StepPhase(core, gate)
        else:
            core.phase = StepPhase(core, gate, partial(streams.step, core))

    @property
    def closed(self) -> bool:
        """Whether no request is to be admitted."""
        return self.balloon is not None and self.balloon.closed

    def between_steps(self) -> bool:
        """Give and take memory, on the engine's thread; return whether the load has changed."""
        return self.balloon is not None and self.balloon.between_steps()

    def shown_load(self, load: EngineLoad) -> EngineLoad:
        """The load as others shall see it: of an engine as large as what it may have."""
        return load if self.balloon is None else self.balloon.renew_use(load)

    def close_streams(self) -> None:
        """Give the SMs back: no step is made any more."""
        if not isinstance(self.streams, str):
            self.streams.close()

    def close(self) -> None:
        """Give all back, once the engine has ended."""
        self.close_streams()
        if self.addresses is not None:
            self.addresses.close()
