"""What bench.rollout_round calls a round's time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.rollout_round import EACH, INSTANCES, LONGEST, SHORTEST, Sample, lengths_of, summarise

PLAIN = Sample(0, False, 0, 200, 10.0, [4.0, 6.0, 8.0, 10.0], [4.0, 10.0], [100, 200])


def test_lengths_are_drawn_for_a_pair_and_are_the_same_each_time() -> None:
    lengths = lengths_of(3)
    assert lengths == lengths_of(3) != lengths_of(4)
    assert len(lengths) == INSTANCES * EACH
    assert SHORTEST <= min(lengths) <= max(lengths) <= LONGEST


def test_work_begins_at_a_free_device_once_its_answer_has_ended() -> None:
    # 5 s on the device that is free at 4; 10 s from 10 on, on any that is free by then.
    assert PLAIN.round_s(0.05) == pytest.approx(20.0)
    assert PLAIN.round_s(0.0) == 10.0


def test_a_round_with_moves_is_compared_with_the_one_without_of_its_pair() -> None:
    moving = replace(PLAIN, moves=True, moved=2, free_s=[2.0, 3.0, 6.0, 10.0])
    slower = [replace(one, pair=1, free_s=[2 * at for at in one.free_s]) for one in (PLAIN, moving)]
    summary = summarise([PLAIN, moving, *slower])
    assert summary["devices_ratio"] == pytest.approx(21 / 28)
    assert summary["devices_ratio_worst"] == pytest.approx(21 / 28)
    assert (summary["answers_ratio"], summary["moved"]) == (1.0, 2.0)
    assert summary["round_ratio_work_0.25"] <= 1.0
