"""What the vLLM adapter does about threads on a GPU, without one: several engines of a process, and
the thread that steps, which isn't the one that loaded the model."""

from __future__ import annotations

import gc
import threading
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from kvmig.engines.engine_thread import EngineThread
from kvmig.engines.vllm import core as core_module
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.embedded import EmbeddedVllm
from kvmig.engines.vllm.groups import one_device
from kvmig.engines.vllm.serving import ServingVllm

pytestmark = pytest.mark.engine

WAIT_S = 20.0


def held_elsewhere(lock: Any) -> bool:
    """Whether another thread must wait for it now."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(blocking=False))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(WAIT_S)
    return not got[0]


def test_engines_of_one_process_step_in_turns_whatever_they_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A2: two threads inside vLLM's forward context read each other's block tables."""
    starts: list[bool] = []
    locks: list[AbstractContextManager[object]] = []

    def init(self: ServingVllm, config: object) -> None:
        self._core = SimpleNamespace(stepping=nullcontext())  # type: ignore[assignment]
        if locks:
            starts.append(held_elsewhere(locks[0]))

    monkeypatch.setattr(ServingVllm, "__init__", init)
    config = cast("VllmConfig", SimpleNamespace(kv_transfer_config=None))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    locks.append(EmbeddedVllm(config)._core.stepping)
    locks.append(EmbeddedVllm(config)._core.stepping)
    assert locks[0] is locks[1]
    assert not isinstance(locks[0], nullcontext)
    assert starts == [True]  # nor does an engine start, and capture graphs, beside a step


def gloo_threads() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def test_process_groups_of_one_process_share_the_thread_of_a_network_device() -> None:
    gc.collect()  # engines of other tests end their threads with it
    before, hour = gloo_threads(), timedelta(hours=1)
    with one_device():
        made: list[Any] = [
            distributed_c10d.ProcessGroupGloo(HashStore(), 0, 1, timeout=hour) for _ in range(5)
        ]
    assert gloo_threads() - before == 1
    for group in made:
        assert group.options._timeout == hour
        group.barrier().wait()


def test_the_engines_thread_has_device_and_stream_of_the_one_that_loaded_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A9."""
    stream, calls = SimpleNamespace(device="cuda:1"), list[tuple[str, object]]()
    this = threading.get_ident()

    def note(name: str) -> Any:
        def call(what: object) -> None:
            assert threading.get_ident() != this
            calls.append((name, what))

        return call

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "set_device", note("device"))
    monkeypatch.setattr(torch.cuda, "set_stream", note("stream"))
    monkeypatch.setattr(core_module, "let_team_go", lambda: None)
    monkeypatch.setattr(StepCore, "run_busy_loop", lambda self: calls.append(("loop", None)))
    core = StepCore.__new__(StepCore)
    core.engine_thread = EngineThread(lambda: None)
    ended = threading.Event()
    core.start(lambda error: ended.set())
    assert ended.wait(WAIT_S)
    assert calls == [("device", "cuda:1"), ("stream", stream), ("loop", None)]
