"""What an engine's steps leave for the copies on a GPU."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.core import EngineCoreProc

from kvmig.core.errors import KvmigError
from kvmig.core.layout import KVLayout
from kvmig.engines import device_copies
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.device_copies import StepMarks
from kvmig.engines.steps import CadenceMeter, StepHold
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.memory import BlockMemory
from tests.support.fake_gpu import FakeGpu

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("overlap", "done"), [(False, [1, 2, 3]), (True, [1, 2])])
def test_a_stream_follows_the_steps_whose_outputs_are_known(
    gpus: None, overlap: bool, done: list[int]
) -> None:
    gpu = FakeGpu()
    engine, side, ran = gpu.new_stream(), gpu.new_stream(), list[int]()
    last = threading.Event()
    marks = StepMarks(gpu, overlap)
    marks.precede(side)  # before the first step there is nothing to wait for
    for number in (1, 2, 3):
        if overlap and number == 3:
            gpu.queue(engine, lambda: last.wait(20))
        gpu.queue(engine, partial(ran.append, number))
        marks.stepped(engine)
    marks.precede(side)
    gpu.finish(side)
    assert ran == done
    last.set()
    gpu.finish(engine)
    marks.close()
    for stream in (engine, side):
        gpu.destroy_stream(stream)


def test_a_step_leaves_its_event_before_anybody_is_told_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def step(core: EngineCoreProc) -> bool:
        calls.append("step")
        return True

    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", step)
    core = StepCore.__new__(StepCore)
    core.cadence_meter, core.hold = CadenceMeter(), StepHold()
    core.stepping, core.phase, core.batch_queue = nullcontext(), None, None
    core.scheduler = SimpleNamespace(lora_config=None)
    core.after_step = lambda: calls.append("event")
    core.between_steps = lambda: calls.append("blocks")
    assert core._process_engine_step()
    assert calls == ["step", "event", "blocks"]


def test_a_call_that_only_launches_a_step_is_none_by_the_meter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", lambda core: True)
    steps: list[float] = []
    core: Any = StepCore.__new__(StepCore)
    core.cadence_meter, core.hold = CadenceMeter(overlap=True), StepHold()
    monkeypatch.setattr(core.cadence_meter, "step", lambda began, ended: steps.append(ended))
    core.stepping, core.phase, core.batch_queue = nullcontext(), None, deque()
    core.scheduler = SimpleNamespace(lora_config=None)
    core.after_step = core.between_steps = lambda: None
    assert core._process_engine_step()
    assert steps == []
    core.batch_queue.append("launched before")
    assert core._process_engine_step()
    assert len(steps) == 1


class Copies:
    """Stands in for `DeviceCopies`."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, stream: int) -> None:
        self.steps.append(stream)

    def close(self) -> None:
        raise KvmigError("the device is gone")


class Cache:
    """Stands in for `SharedCache`."""

    closed = False

    def close(self) -> None:
        self.closed = True


class Config:
    max_concurrent_batches = 2


class Stream:
    cuda_stream = 77


def test_the_event_is_left_on_the_stream_that_the_engine_queues_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies, loaded = Copies(), list[tuple[int, bool]]()

    def load(plan: object, gpu: int, steps_overlap: bool) -> Copies:
        loaded.append((gpu, steps_overlap))
        return copies

    monkeypatch.setattr(device_copies, "load", load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream)
    memory = BlockMemory.__new__(BlockMemory)
    made: object = memory._on_gpu(Config(), None, None)  # type: ignore[arg-type]
    assert made is copies
    memory.after_step()
    assert (copies.steps, loaded) == ([77], [(0, True)])


def test_workers_of_other_processes_leave_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is torch asked for a stream: it would begin CUDA in a process that computes nothing."""
    copies = Copies()
    monkeypatch.setattr(device_copies, "load", lambda plan, gpu, steps_overlap: copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("asked"))
    memory = BlockMemory.__new__(BlockMemory)
    memory._stepping_on = None
    memory._on_gpu(Config(), None, 1)  # type: ignore[arg-type]
    memory.after_step()
    assert copies.steps == []


def test_the_cache_is_unmapped_even_if_the_device_fails_at_the_end() -> None:
    memory, cache = BlockMemory.__new__(BlockMemory), Cache()
    memory.copies = BlockCopies(KVLayout((), 0, 1, ""), Copies())  # type: ignore[arg-type]
    memory._cache = cache  # type: ignore[assignment]
    memory._gpu = Copies()  # type: ignore[assignment]
    with pytest.raises(KvmigError, match="the device is gone"):
        memory.close()
    assert cache.closed
