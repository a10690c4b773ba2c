"""The transformers engine with copies as on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvmig.engines import device_copies
from kvmig.engines.base import EmittedTokens, Frame
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.transformers import factory
from kvmig.engines.transformers.payload import StepOutput, decode
from kvmig.engines.transformers.serving import ServingTransformers
from tests.support.fake_gpu import FakeGpu, FakeKernels


class OnGpu:
    """An engine whose copies run on a GPU, which its steps leave their events on."""

    def __init__(self, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = FakeGpu(device)
        self.kernels = FakeKernels(self.gpu)
        self.stepped = False
        self.stream = self.gpu.new_stream()

        def load(plan: Any, gpu: int, steps_overlap: bool) -> device_copies.DeviceCopies:
            assert not steps_overlap
            return device_copies.DeviceCopies(plan, self.gpu, self.kernels, steps_overlap)

        self.engine: ServingTransformers = factory(num_blocks=40)
        monkeypatch.setattr(device_copies, "load", load)
        engine = self.engine
        engine._copies.close()
        engine._device_copies = engine._on_gpu()
        engine.layout = replace(engine.layout, gpu=device)
        engine._copies = BlockCopies(engine.layout, engine._device_copies)
        engine.gather, engine.scatter = engine._copies.gather, engine._copies.scatter
        self.got: list[int] = []
        self.pace_s = 0.0

    def connect(self) -> None:
        def take(client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
            for output in decode(bytes(frames[0]), list[StepOutput]):
                self.got += output.token_ids

        self.engine.connect(take, lambda *done: None, lambda error: None)

    def put_steps_on_the_gpu(self) -> None:
        """Once the engine steps: torch has no such stream."""
        leave_event = self.engine._loop.after_step

        def after_step() -> None:
            leave_event()
            self.stepped = True
            time.sleep(self.pace_s)

        self.engine._loop.after_step = after_step
        self.engine._loop.stream = SimpleNamespace(cuda_stream=self.stream)

    def hold_copies(self, until: Callable[[], object]) -> None:
        """Let no copy go on before `until` has returned."""
        copies = self.engine._device_copies
        assert copies is not None
        for stream in copies._streams:
            self.gpu.queue(stream.handle, until)

    async def close(self) -> None:
        await self.engine.close(10)
        self.kernels.close()
        self.gpu.destroy_stream(self.stream)
