"""GPUStack's formulas: golden figures, worked out by hand from its published code.

Source: gpustack/gpustack, gpustack/policies/scorers/placement_scorer.py at
0172927139b3512ae7d28827dd9bc48fb8897958 (`_score_spread_gpu`, `_score_spread_cpu`,
`_score_binpack_item`, weights 2 for VRAM, 1 for RAM, 0.2 for other models) and
model_file_locality_scorer.py at 0caab00632f2ec87e9a91ce12a78d6689e1b542b (5 at most).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.fleet.place_scores import (
    BOTH,
    ONLY_OTHERS,
    ONLY_OWN,
    OTHERS_WEIGHT,
    Counts,
    binpack_score,
    locality_score,
    spread_part,
    spread_score,
)
from kvmig.fleet.worker_nodes import NO_GPU


@pytest.mark.parametrize(
    ("own", "others", "gpus", "devices", "score"),
    [
        ({}, {}, ["0"], 8, 100),  # nothing is there
        ({}, {"0": 1}, ["1"], 1, 90 + 10 / 2),  # an unused GPU beside another model's
        ({}, {"0": 1}, ["0"], 1, 90 + 10 / 2 / 2),
        ({}, {"0": 3}, ["0"], 4, 90 + 10 / 5 / 4),
        ({"0": 1}, {}, ["1"], 2, 80 + 10 / 3),
        ({"0": 1}, {}, ["0"], 2, 80 + 10 / 3 / 2),
        ({"0": 1}, {"1": 1}, ["2"], 3, 70 + 10 / 4),
        ({"0": 1}, {"1": 1}, ["0"], 3, 70 + 10 / 4 / (2 + 1 * 0.2)),
        ({"0": 1}, {"1": 1}, ["1"], 3, 70 + 10 / 4 / (1 + 2 * 0.2)),
        ({"0": 2}, {"0": 1}, ["0"], 1, 70 + 10 / 2 / (3 + 2 * 0.2)),
        # several GPUs add up
        ({}, {"0": 1, "1": 2}, ["0", "1"], 2, 90 + 10 / 3 / 2 + 10 / 3 / 3),
        ({}, {"7": 1}, ["0", "1", "2", "3"], 8, 90 + 4 * 10 / 9),
    ],
)
def test_spread_of_gpus_is_as_gpustack_computes_it(
    own: Counts, others: Counts, gpus: list[str], devices: int, score: float
) -> None:
    every = {gpu: own.get(gpu, 0) + others.get(gpu, 0) for gpu in {**own, **others}}
    assert spread_score(own, every, gpus, devices) == pytest.approx(score)


@pytest.mark.parametrize(
    ("own", "others", "score"),
    [
        (0, 0, 100),
        (0, 1, 90 + 10 / 2),
        (0, 4, 90 + 10 / 5),
        (1, 0, 80 + 10 / 2),
        (3, 0, 80 + 10 / 4),
        (1, 1, 70 + 10 / (2 + 2 * 0.2)),
        (2, 3, 70 + 10 / (3 + 4 * 0.2)),
    ],
)
def test_spread_on_a_cpu_is_as_gpustack_computes_it(own: int, others: int, score: float) -> None:
    counted = {NO_GPU: own} if own else {}
    every = {NO_GPU: own + others} if own + others else {}
    assert spread_score(counted, every, [], 0) == pytest.approx(score)


@pytest.mark.parametrize(
    ("memory", "memory_free", "each", "frees", "score"),
    [
        (10, 100, 40, [80], (10 + 2 * 50) / 3),
        (0, 100, 40, [40], 2 * 100 / 3),
        (10, 100, 20, [80, 40], (10 + 2 * 50) / 3),  # the fullest one counts
        (10, 0, 20, [80], 2 * 25 / 3),
        (25, 100, 0, [], 25),  # on a CPU
    ],
)
def test_binpack_is_as_gpustack_computes_it(
    memory: int, memory_free: int, each: int, frees: list[int], score: float
) -> None:
    assert binpack_score(memory, memory_free, each, frees) == pytest.approx(score)


def test_files_on_the_disk_are_worth_five() -> None:
    assert locality_score("hf:a", {"hf:a", "hf:b"}) == 5
    assert locality_score("hf:c", {"hf:a"}) == 0
    assert locality_score("", {""}) == 0


counts = st.integers(0, 9)


@given(st.sampled_from([ONLY_OTHERS, ONLY_OWN, BOTH]), counts, counts, counts, counts)
def test_a_gpu_with_a_smaller_weighted_count_never_adds_less(
    base: float, own: int, others: int, more_own: int, more_others: int
) -> None:
    """The GPUs of a node are put in order by that count."""
    if base == ONLY_OTHERS:
        own = more_own = 0
    if base == ONLY_OWN:
        others = more_others = 0
    less, more = own + others * OTHERS_WEIGHT, more_own + more_others * OTHERS_WEIGHT
    if less <= more:
        assert spread_part(base, own, others) >= spread_part(base, more_own, more_others) - 1e-12
