"""How a start's parts are said to people."""

from __future__ import annotations

from kvmig.core.start_times import StartTimes


def test_parts_that_took_a_tenth_of_a_second_are_named_in_their_order() -> None:
    times = StartTimes(
        imports_s=5.31, weights_s=1.2, compile_s=0.4, kv_cache_s=0.02, warm_up_s=2.0, total_s=9.04
    )
    said = "9.0 s: imports 5.3, weights 1.2, compile 0.4, warm-up 2.0"
    assert times.words() == said


def test_a_graph_that_was_compiled_before_is_told_apart() -> None:
    assert StartTimes(compile_s=0.4, compiled="found", total_s=1).words() == (
        "1.0 s: compiled before 0.4"
    )


def test_a_start_without_parts_is_its_whole() -> None:
    assert StartTimes(total_s=0.04).words() == "0.0 s"
