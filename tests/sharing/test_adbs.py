"""Who of a unit's models computes next: ADBS and the policies beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.engines.gate import PARTS, ComputeShares, StepRequest
from kvmig.sharing.policies import OVERBOOKED, POLICIES, DeviceState, ScheduledStep

BOTH = StepRequest(prompt_tokens=1, decodes=1)
DECODES = StepRequest(prompt_tokens=0, decodes=1)
PROMPTS = StepRequest(prompt_tokens=1, decodes=0)


def gate(policy: str = "adbs", **decode: int) -> DeviceState:
    return DeviceState(
        policy, {name: ComputeShares(PARTS, parts) for name, parts in decode.items()}
    )


def test_prompts_go_first_and_take_turns() -> None:
    it = gate(a=4, b=4)
    for model in ("a", "b"):
        it.record_request(model, PROMPTS)
    (first,) = it.grants()
    assert first == ScheduledStep("a", "prefill", PARTS)
    it.finish_step(first)
    it.record_request("a", PROMPTS)
    (second,) = it.grants()
    assert second == ScheduledStep("b", "prefill", PARTS)


def test_models_decode_beside_each_other_as_long_as_their_parts_fit() -> None:
    it = gate(a=4, b=4, c=4, d=4)
    for model in it.models:
        it.record_request(model, DECODES)
    assert [one.model for one in it.grants()] == ["a", "b", "c"]  # 12 of 10 parts


def test_who_found_no_place_decodes_next() -> None:
    it = gate(a=7, b=7)
    for model in it.models:
        it.record_request(model, DECODES)
    (first,) = it.grants()
    it.finish_step(first)
    it.record_request("a", DECODES)
    assert [one.model for one in it.grants()] == ["b"]


def test_prompts_that_dont_fit_hold_new_decode_steps_back() -> None:
    it = gate(a=4, b=4, c=4)
    it.record_request("a", DECODES)
    (running,) = it.grants()
    it.record_request("b", PROMPTS)
    it.record_request("c", DECODES)
    assert it.grants() == []
    it.finish_step(running)
    it.record_request("a", DECODES)
    assert [(one.model, one.kind) for one in it.grants()] == [("b", "prefill")]


def test_an_engine_that_is_gone_holds_nothing() -> None:
    it = gate(a=10, b=10)
    for model in it.models:
        it.record_request(model, PROMPTS)
    it.grants()
    it.remove_model("a")
    assert [one.model for one in it.grants()] == ["b"]


def test_an_end_that_was_counted_already_ends_nothing_else() -> None:
    it = gate(a=4)
    it.record_request("a", PROMPTS)
    (old,) = it.grants()
    it.remove_model("a")
    it.record_request("a", DECODES)
    (new,) = it.grants()
    it.finish_step(old)
    assert it.running == {"a": new}


def test_fcfs_does_one_thing_at_a_time_for_the_oldest_request() -> None:
    it = gate("fcfs", a=4, b=4)
    it.record_request("a", StepRequest(prompt_tokens=0, decodes=1, oldest_decode=5.0))
    it.record_request("b", StepRequest(prompt_tokens=0, decodes=1, oldest_decode=2.0))
    (only,) = it.grants()
    assert only == ScheduledStep("b", "decode", PARTS)


def test_round_robin_does_one_thing_at_a_time_model_after_model() -> None:
    it = gate("round-robin", a=4, b=4)
    for model in it.models:
        it.record_request(model, BOTH)
    (first,) = it.grants()
    assert first == ScheduledStep("a", "prefill", PARTS)
    it.finish_step(first)
    it.record_request("a", BOTH)
    assert [one.model for one in it.grants()] == ["b"]


def test_round_robin_on_shares_waits_for_who_doesnt_fit() -> None:
    it = gate("round-robin-shares", a=4, b=10, c=4)
    for model in it.models:
        it.record_request(model, DECODES)
    assert [one.model for one in it.grants()] == ["a"]


def test_without_a_gate_everybody_goes_at_once() -> None:
    it = gate("free", a=4, b=4, c=4, d=4)
    for model in it.models:
        it.record_request(model, BOTH)
    assert [one.kind for one in it.grants()] == ["prefill"] * 4


wants = st.builds(
    StepRequest,
    prompt_tokens=st.integers(0, 1),
    decodes=st.integers(0, 1),
    oldest_prompt=st.floats(0, 9),
    oldest_decode=st.floats(0, 9),
)
events = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["want", "done", "left"]), wants),
    max_size=60,
)
parts = st.fixed_dictionaries({name: st.integers(1, 10) for name in "abcd"})


@given(policy=st.sampled_from(sorted(POLICIES)), decode=parts, events=events)
def test_whatever_happens_a_model_has_one_job_and_the_sms_are_booked_as_allowed(
    policy: str, decode: dict[str, int], events: list[tuple[str, str, StepRequest]]
) -> None:
    it = gate(policy, **decode)
    for model, what, want in events:
        if what == "want":
            it.record_request(model, want)
        elif what == "left":
            it.remove_model(model)
        elif model in it.running:
            it.finish_step(it.running[model])
        before = set(it.running)
        begun = it.grants()
        assert not before & {one.model for one in begun}
        assert len({one.model for one in begun}) == len(begun)
        assert it.grants() == [], "all that can begin has begun"
        jobs = list(it.running.values())
        if policy != "free":
            assert it.booked <= PARTS + OVERBOOKED
        if policy in ("fcfs", "round-robin"):
            assert len(jobs) <= 1
        if policy == "adbs":
            assert sum(one.kind == "prefill" for one in jobs) <= 1


@given(
    policy=st.sampled_from(["adbs", "round-robin", "round-robin-shares"]),
    decode=parts,
    prompts=st.integers(0, 5),
)
def test_everybody_who_wants_to_decode_gets_a_turn(
    policy: str, decode: dict[str, int], prompts: int
) -> None:
    """Once no more prompts come, whatever parts it takes."""
    it = gate(policy, **decode)
    steps = dict.fromkeys("abcd", 0)
    for model in it.models:
        it.record_request(model, DECODES)
    for turn in range(60):
        if turn < prompts:
            it.record_request("abcd"[turn % 4], PROMPTS)
        for job in it.grants():
            steps[job.model] += job.kind == "decode"
        for job in list(it.running.values())[:1]:
            it.finish_step(job)
            it.record_request(job.model, DECODES)
    assert min(steps.values()) >= 1


def test_an_unknown_policy_and_shares_that_cant_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="policy is 'best', must be adbs or fcfs or"):
        gate("best", a=1)
    with pytest.raises(ConfigError, match=r"model a: shares are \(10, 0\), must be 1 to 10"):
        gate(a=0)
    with pytest.raises(ConfigError, match=r"model a: shares are \(10, 11\)"):
        gate(a=11)
