"""A placement as a file: what is read, and what is refused with its field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import at_least, plan_of, read, to_toml
from kvmig.placement.moves import MoveUnit, PlacedLease, PlanStep, PlanWave
from kvmig.placement.problem import ModelLoad, cluster_of
from kvmig.placement.worth import delayed, worth

UNIT = "[[units]]\nname = 'left'\nmemory_bytes = 1000\n"
CHAT = "[[units.models]]\nname = 'chat'\nheld_bytes = 300\nfloor_bytes = 50\nkv_bytes = 100\n"
SHARING = CHAT + "decode_share = 0.7\n"
GOOD = UNIT + CHAT


def test_what_is_written_is_read_again() -> None:
    placement = read(GOOD + CHAT.replace("chat", 'c"ode') + UNIT.replace("left", "right"), "p.toml")
    assert read(to_toml(placement), "again") == placement
    assert placement.leases() == {
        ("chat", "left"): PlacedLease(100),
        ('c"ode', "left"): PlacedLease(100),
    }


def test_a_unit_with_an_agent_keeps_its_arena_and_its_quotas_may_change() -> None:
    placement = read(GOOD.replace("= 1000\n", "= 1000\narena_bytes = 400\n"), "p.toml")
    assert read(to_toml(placement), "again") == placement
    site = placement.site({"chat": 1.0})
    assert (site.elastic, site.units["left"]) == (True, MoveUnit(1000, 0, 400))
    assert not read(GOOD, "p.toml").site({"chat": 1.0}).elastic


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("units = []", "units is empty"),
        (GOOD + UNIT, "unit left is there twice"),
        (GOOD + CHAT, "unit left: model chat is there twice"),
        (
            UNIT + "gpus = [0, 0]\n" + CHAT,
            "GPU 0 of node 0 is in two units",
        ),
        (GOOD + "decode_share = 0.0", "unit left: model chat: decode_share is 0, must be above 0"),
        (GOOD + "decode_share = 1.01", "decode_share is 1.01, must be above 0 and at most 1"),
        (GOOD + "decode_share = nan", "decode_share is nan"),
        (GOOD + "rate = nan", "rate is nan, must be a number of 0 or more"),
        (GOOD + "expected_rate = inf", "expected_rate is inf"),
        (GOOD + "rate = -1", "rate is -1"),
        (GOOD + "tp = 2", "tp is 2, must be 1: a model runs on all GPUs"),
        (GOOD.replace("= 100\n", "= 49\n"), r"kv_bytes is 49, must be 50 \(floor_bytes\) or more"),
        (GOOD.replace("= 300", "= 901"), "left: its models take .* GiB more than memory_bytes"),
        (GOOD.replace("= 300", "= -1"), "held_bytes is -1, must be 0 to"),
        (GOOD.replace("= 1000", "= 0"), "memory_bytes is 0, must be 1 to"),
        (GOOD.replace("'chat'", "''"), "name has 0 characters"),
        (
            GOOD + UNIT.replace("left", "right") + CHAT.replace("= 300", "= 301"),
            "model chat: held_bytes is 301 in unit right, must be 300, as before",
        ),
        (
            UNIT + "gpus = [0]\n" + SHARING + SHARING.replace("chat", "code"),
            "decode_share is 1.4 in all, must be 1.2 at most",
        ),
        (
            GOOD.replace("= 1000\n", "= 1000\narena_bytes = 99\n"),
            "left: kv_bytes of its models are 1 bytes more than arena_bytes, 99",
        ),
        (
            GOOD.replace("= 1000\n", "= 1000\narena_bytes = 1001\n"),
            r"left: arena_bytes is 1001, must be 0 to 1000 \(memory_bytes\)",
        ),
        (
            GOOD.replace("= 1000\n", "= 1000\narena_bytes = 100\n") + UNIT.replace("left", "right"),
            "unit right: arena_bytes is 0, must be 1 or more: all units have agents or none",
        ),
        (GOOD + "gpu = 3", "gpu"),
        ("units = 3", "units"),
    ],
)  # fmt: skip
def test_a_placement_that_cant_be_is_refused_with_its_field(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        read(text, "p.toml")
    assert str(refused.value).startswith("p.toml: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "gpus", "rate", "sentence"),
    [
        ("nobody", "[0]", 1, "unit left: model is 'nobody', must be of chat"),
        ("chat", "[0, 1, 2]", 1, "gpus are 3, llama-7b runs on 1, 2, 4, 8"),
        ("chat", "[0]", 0, "model chat needs a rate"),
    ],
)
def test_what_the_estimator_doesnt_know_is_refused(
    name: str, gpus: str, rate: int, sentence: str
) -> None:
    estimator = PlanEstimator([ModelLoad("chat", "llama-7b", 1.0)], cluster_of("1x4:a100-80g"))
    text = f"{UNIT}gpus = {gpus}\n{CHAT.replace('chat', name)}rate = {rate}\n"
    with pytest.raises(ConfigError, match=sentence):
        plan_of(read(text, "p.toml"), estimator, "p.toml")


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=6))
def test_quotas_are_raised_to_their_floors_and_never_grow_in_sum(
    pairs: list[tuple[int, int]],
) -> None:
    floors, quotas = [one for one, _ in pairs], [one for _, one in pairs]
    if sum(floors) > sum(quotas):
        return
    raised = at_least(floors, quotas)
    assert all(quota >= floor for floor, quota in zip(floors, raised, strict=True))
    assert sum(raised) <= sum(quotas)


# -- whether it is worth it


def test_what_is_delayed_is_what_instances_that_are_gone_would_have_served() -> None:
    drain = PlanStep("drain", "a", "left", 2.0)
    start = PlanStep("start", "a", "right", 10.0)
    rates = {("a", "left"): 3.0, ("a", "mid"): 4.0}
    assert delayed([PlanWave((drain,)), PlanWave((start,))], rates, {}, 0.0) == pytest.approx(36.0)
    assert (
        delayed([PlanWave((start,)), PlanWave((drain,))], rates, {("a", "right"): 3.0}, 0.5) == 1.5
    )


def test_it_is_worth_it_by_a_margin() -> None:
    assert worth(1.0, 600, 499).it
    assert not worth(1.0, 600, 501).it
    assert not worth(-1.0, 600, 0).it
