"""What keeps a vLLM engine's thread counts as a step that takes long. No engine is made."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvmig.engines.vllm import core as core_module
from kvmig.engines.vllm.core import StepCore

pytestmark = pytest.mark.engine


@pytest.fixture
def core() -> StepCore:
    """Without anything that it would step."""
    made = StepCore.__new__(StepCore)
    made.step_began = None
    made.between_steps = lambda: None
    made.called = lambda method, args: None
    return made


def test_a_call_between_two_steps_is_timed(core: StepCore) -> None:
    seen: list[float | None] = []
    before = time.monotonic()
    future: Future[Any] = Future()
    core._handle_client_request(core_module._CALL, (lambda: seen.append(core.step_began), future))
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
