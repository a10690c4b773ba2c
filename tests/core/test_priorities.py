"""Priority classes and their flag."""

from __future__ import annotations

import msgspec
import pytest

from kvmig.core.config import ClusterConfig, check
from kvmig.core.errors import ConfigError
from kvmig.core.priorities import (
    NORMAL,
    PriorityClass,
    class_of,
    named,
    names_and_numbers,
    with_normal,
    with_priority,
)
from kvmig.engines.vllm.kind import scheduling_flags
from kvmig.launcher.flags import parse, parse_class

HIGH = PriorityClass("high", -1, headroom_tokens=1600)
LOW = PriorityClass("low", 5)


def test_a_class_has_a_headroom_or_a_target() -> None:
    assert parse_class("high=-1,headroom=1600") == HIGH
    assert parse_class("fast=-2,target=12.5") == PriorityClass("fast", -2, target_ms=12.5)
    assert parse_class("low=5") == LOW


def test_normal_is_there_unless_another_has_priority_0() -> None:
    assert with_normal([LOW, HIGH]) == (HIGH, NORMAL, LOW)
    assert with_normal([PriorityClass("usual", 0)]) == (PriorityClass("usual", 0),)
    assert with_normal([]) == (NORMAL,)


def test_a_class_is_found_by_number_and_by_name() -> None:
    classes = with_normal([HIGH])
    assert with_priority(classes, -1) == HIGH == named(classes, "high")
    assert with_priority(classes, 7) is None is named(classes, "low")
    assert names_and_numbers(classes) == "high (-1) or normal (0)"


def test_a_number_between_the_classes_counts_as_the_next_one_after_it() -> None:
    classes = with_normal([PriorityClass("high", -10), LOW])
    numbers = (-99, -10, -9, 0, 3, 5, 6)
    assert [class_of(classes, number).name for number in numbers] == [
        "high", "high", "normal", "normal", "low", "low", "low",
    ]  # fmt: skip


def test_the_flag_fills_the_config_that_every_process_gets() -> None:
    config, rest, _ = parse(["m", "--priority-class", "high=-1,headroom=1600", "--port=1"])
    assert config.priorities == (HIGH, NORMAL)
    assert rest == ["m", "--port=1"]
    sent = msgspec.json.encode(config)
    assert msgspec.json.decode(sent, type=ClusterConfig) == config
    assert parse(["m"])[0].priorities == (NORMAL,)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["high"], "--priority-class is 'high', must be NAME=PRIORITY"),
        (["high=one"], "is 'high=one', must be NAME=PRIORITY"),
        (["high=1,speed=3"], "is 'high=1,speed=3', must be"),
        (["high=1,headroom=2,headroom=3"], "must be NAME=PRIORITY"),
        (["high=1,headroom=-2"], "high: headroom is -2, must be 0 or more"),
        (["high=1,target=-2"], "high: target is -2, must be more than 0"),
        (["high=1,target=nan"], "high: target is nan, must be more than 0"),
        (["high=1,target=inf"], "high: target is inf, must be 0 or more and finite"),
        (["high=1,headroom=9,target=5"], "headroom is 9, must be left out where a target (5 ms)"),
        (["1=1"], "name is '1', must be a letter"),
        (["a=1", "a=2"], "a is there twice (priorities 1 and 2), must be given once"),
        (["a=1", "b=1"], "b: priority is 1, must differ from that of a"),
        (["normal=5"], "normal is there twice (priorities 0 and 5)"),
    ],
)
def test_bad_classes_are_refused_by_name(given: list[str], sentence: str) -> None:
    argv = [word for one in given for word in ("--priority-class", one)]
    with pytest.raises(ConfigError) as refused:
        parse(["m", *argv])
    assert sentence in str(refused.value)


def test_engines_order_by_priority_where_there_are_classes() -> None:
    two = with_normal([HIGH])
    assert scheduling_flags(["m"], [NORMAL]) == []
    assert scheduling_flags(["m", "--port=1"], two) == ["--scheduling-policy=priority"]
    for said in (["--scheduling-policy", "fcfs"], ["--scheduling_policy=fcfs"]):
        assert scheduling_flags(said, [NORMAL]) == []
        with pytest.raises(ConfigError, match="--scheduling-policy is fcfs, must be priority"):
            scheduling_flags(said, two)


def test_a_config_without_a_class_of_priority_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have a class of priority 0"):
        check(ClusterConfig(priorities=(HIGH,)))
