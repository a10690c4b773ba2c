"""Requests that a vLLM engine doesn't take over, with the reason. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from kvmig.core.errors import MigrationRefused
from kvmig.engines.base import RequestExport
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.migration import (
    VllmDestination,
    VllmProgress,
    check_known,
    encode_progress,
    encode_request,
    token_request,
)
from kvmig.engines.vllm.offload import CacheOffload
from kvmig.engines.vllm.serving import ServingVllm
from kvmig.engines.vllm.tables import RequestTables

pytestmark = pytest.mark.engine


def request(name: str = "r", tokens: int = 64) -> Request:
    """One that comes."""
    return Request(name, [1] * tokens, SamplingParams(max_tokens=9), None)


NO_TABLES = cast("RequestTables", None)
"""Nothing gets as far as its blocks."""
WEIGHTS = "w"
"""Their identity at both ends."""


def destination(*running: str, seats: int = 4, longest: int = 100) -> VllmDestination:
    """With these requests."""
    scheduler: Any = object.__new__(Scheduler)
    scheduler.running = [request(name) for name in running]
    scheduler.requests = {one.request_id: one for one in scheduler.running}
    scheduler.max_num_active_reqs = seats
    scheduler.max_model_len = longest
    scheduler.lora_config = None
    scheduler.connector = None
    awake: Any = SimpleNamespace(scheduler=scheduler, is_sleeping=lambda: False, clears=False)
    core = cast("StepCore", awake)
    return VllmDestination(core, NO_TABLES, CacheOffload(scheduler), lambda: WEIGHTS)


@pytest.mark.parametrize(
    ("there", "comes", "reason", "sentence"),
    [
        (destination("r"), request(), "already_migrating", "r is here already"),
        (destination(longest=50), request(), "incompatible", "64 tokens are too long"),
        (destination("a", "b", seats=2), request(), "no_batch_slot", "2 requests run"),
    ],
)
def test_a_request_that_has_no_place_is_refused_and_nothing_is_kept(
    there: VllmDestination, comes: Request, reason: str, sentence: str
) -> None:
    with pytest.raises(MigrationRefused, match=sentence) as refusal:
        there.reserve(comes, VllmProgress([], 16, prefilled=False), WEIGHTS)
    assert refusal.value.reason == reason
    assert there.reserved() == 0


@pytest.mark.parametrize(
    ("limit_there", "limit_here", "sentence"),
    [
        (100, 70, "it may have 73 tokens there, 70 here"),
        (70, 100, "it may have 70 tokens there, 73 here"),
        (0, 60, "64 tokens are too long"),
    ],
)
def test_a_request_that_would_end_elsewhere_in_its_answer_is_refused(
    limit_there: int, limit_here: int, sentence: str
) -> None:
    """It has 64 tokens, and may get 9."""
    progress = VllmProgress([], 16, prefilled=False, max_tokens=limit_there)
    with pytest.raises(MigrationRefused, match=sentence) as refusal:
        destination(longest=limit_here).reserve(request(), progress, WEIGHTS)
    assert refusal.value.reason == "incompatible"


@pytest.mark.parametrize(("limit_there", "limit_here"), [(100, 73), (73, 100), (0, 70)])
def test_other_limits_that_it_does_not_reach_keep_no_request_away(
    limit_there: int, limit_here: int
) -> None:
    progress = VllmProgress([], 0, prefilled=False, max_tokens=limit_there)
    there = destination(longest=limit_here)
    there.reserve(request(), progress, WEIGHTS)
    assert there.reserved() == 1


def test_a_request_of_other_weights_is_refused() -> None:
    there = destination()
    with pytest.raises(MigrationRefused, match="the weights were updated meanwhile"):
        there.reserve(request(), VllmProgress([], 0, prefilled=False), "others")
    assert there.reserved() == 0


def test_what_was_never_reserved_is_not_grown_or_committed() -> None:
    there = destination()
    for ask in (
        lambda: there.grow("r", 64),
        lambda: there.commit("r", VllmProgress([], 64, prefilled=False), None),
    ):
        with pytest.raises(MigrationRefused, match="r has no reservation here") as refusal:
            ask()
        assert refusal.value.reason == "unknown_request"


@pytest.mark.parametrize(
    "payload",
    [[], [b"\xc1"], [encode_progress(VllmProgress([], 0, prefilled=False))], [b"\x80", b"\x80"]],
)
async def test_an_export_of_another_engine_is_refused_as_such(payload: list[bytes]) -> None:
    engine = object.__new__(ServingVllm)
    with pytest.raises(MigrationRefused, match="export of another kind") as refusal:
        await engine.reserve(RequestExport("r", 64, payload))
    assert refusal.value.reason == "incompatible"


# -- what another minor of vLLM has encoded


def newer(params: dict[str, Any], *more: object) -> list[bytes]:
    """A request with sampling parameters besides, and fields behind those that we know."""
    encoded = encode_request(token_request("r", [1, 2, 3], SamplingParams(seed=7)))
    fields = msgspec.msgpack.decode(encoded[0])
    at = EngineCoreRequest.__struct_fields__.index("sampling_params")
    fields[at] |= params
    return [msgspec.msgpack.encode([*fields, *more]), *encoded[1:]]


def test_a_request_of_this_very_vllm_is_known() -> None:
    check_known(newer({}))
    check_known(encode_request(token_request("r", [1] * 9, SamplingParams(logprobs=3))))


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        (newer({"beam_me": 3, "a_new_one": 1}), "no sampling parameter a_new_one, beam_me"),
        (newer({}, "more"), "knows a request by fewer fields"),
    ],
)
def test_a_request_that_says_what_this_vllm_does_not_know_is_refused_by_name(
    frames: list[bytes], named: str
) -> None:
    with pytest.raises(MigrationRefused, match=named) as refusal:
        check_known(frames)
    assert refusal.value.reason == "incompatible"
