"""What keeps a vLLM engine's thread counts as a step that takes long. No engine is made."""

from __future__ import annotations

import gc
import queue
import time
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from kvmig.engines.engine_thread import EngineThread
from kvmig.engines.vllm.core import StepCore

pytestmark = pytest.mark.engine


@pytest.fixture
def core() -> StepCore:
    """Without anything that it would step."""
    made = StepCore.__new__(StepCore)
    made.step_began = None
    made.engine_thread = EngineThread(made.fail_calls)
    made.input_queue = queue.Queue()
    made.between_steps = lambda: None
    made.called = lambda method, args: None
    return made


def test_what_a_failed_call_held_goes_with_its_future(core: StepCore) -> None:
    """Also what vLLM's own frames, under which it was made, have of it."""

    class HeldMemory:
        """What a call holds."""

    def fail() -> None:
        held = HeldMemory()
        found.append(weakref.ref(held))
        raise RuntimeError

    found = list[weakref.ref[HeldMemory]]()
    core.process_input_queue_block, core.aborts_queue = False, queue.Queue()
    core.shutdown_state = EngineShutdownState.RUNNING
    core._idle_state_callbacks, core.batch_queue = [], None
    core.engines_running = False
    core.scheduler = cast("Any", SimpleNamespace(has_requests=lambda: False))
    future = core.call(fail)
    gc.disable()
    try:
        core._process_input_queue()
        assert isinstance(future.exception(0), RuntimeError)
        del future
        assert found[0]() is None
    finally:
        gc.enable()


def test_an_engine_that_fails_says_so_though_nobody_waits_for_a_call_any_more(
    core: StepCore,
) -> None:
    given_up, waits = core.call(lambda: 1), core.call(lambda: 2)
    given_up.cancel()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    with mock.patch.object(StepCore, "run_busy_loop", side_effect=OSError("torn")):
        core.start(ended.put)
        error = ended.get(timeout=10.0)
    assert str(error) == "torn"
    assert isinstance(waits.exception(0), RuntimeError)


def test_a_call_between_two_steps_is_timed(core: StepCore) -> None:
    seen: list[float | None] = []
    before = time.monotonic()
    future: Future[Any] = core.call(lambda: seen.append(core.step_began))
    core._handle_client_request(*core.input_queue.get_nowait())
    assert future.done()
    assert core.step_began is None
    (began,) = seen
    assert began is not None
    assert before <= began <= time.monotonic()


@pytest.mark.parametrize("fails", [False, True])
def test_a_utility_call_is_timed(core: StepCore, fails: bool) -> None:
    seen: list[float | None] = []

    def handle(kind: object, request: object) -> None:
        seen.append(core.step_began)
        if fails:
            raise OSError("no such file")

    with mock.patch.object(EngineCoreProc, "_handle_client_request", side_effect=handle):
        try:
            core._handle_client_request(EngineCoreRequestType.UTILITY, (1, 2, "sleep", ()))
        except OSError:
            assert fails
    assert len(seen) == 1
    assert seen[0] is not None
    assert core.step_began is None
