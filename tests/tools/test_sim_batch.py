from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig_tools.sim.batch import DecodeBatch
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.steps import Steps
from tests.support.examples import examples

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40)), min_size=1, max_size=6)


def decoding(lengths: list[tuple[int, int]], block_tokens: int = 4) -> DecodeBatch:
    """Requests of (input, output) tokens whose first token is out."""
    batch = DecodeBatch(block_tokens)
    for index, (prompt, output) in enumerate(lengths):
        request = SimRequest(index, 0.0, prompt, output)
        request.generated = 1
        batch.add(request)
    return batch


def held(batch: DecodeBatch, ahead: int = 0) -> int:
    return sum(batch.blocks(one, ahead) for one in batch.requests.values())


@given(LENGTHS, st.integers(0, 30), st.integers(0, 20))
@examples(60)
def test_blocks_of_many_steps_are_those_of_each_step_together(
    lengths: list[tuple[int, int]], begin: int, steps: int
) -> None:
    batch = decoding(lengths)
    batch.steps += begin
    assert batch.growth(steps) == held(batch, steps) - held(batch)


@given(LENGTHS, st.integers(0, 40), st.integers(1, 50))
@examples(60)
def test_steps_within_is_the_last_count_that_fits(
    lengths: list[tuple[int, int]], free: int, most: int
) -> None:
    batch = decoding(lengths)
    steps = batch.steps_within(free, most)
    assert steps <= most
    assert batch.growth(steps) <= free
    assert steps == most or batch.growth(steps + 1) > free


@given(LENGTHS)
@examples(60)
def test_each_request_ends_with_its_last_token(lengths: list[tuple[int, int]]) -> None:
    batch = decoding(lengths)
    ended: dict[int, int] = {}
    while batch.requests:
        for request in batch.advance(batch.steps_to_end()):
            batch.remove(request)
            ended[request.index] = request.generated
    assert ended == {index: output for index, (_, output) in enumerate(lengths)}
    assert batch.context == 0
    assert batch.growth(4) == 0


def test_a_request_that_comes_back_ends_once() -> None:
    batch = decoding([(5, 9), (5, 9)])
    first = batch.requests[0]
    batch.remove(first)
    batch.add(first)
    finished = batch.advance(batch.steps_to_end())
    assert sorted(one.index for one in finished) == [0, 1]


@given(st.floats(0.001, 0.2), st.floats(0, 0.002), st.integers(1, 500), st.floats(0, 1, width=32))
@examples(100)
def test_steps_done_are_those_that_have_ended(
    first: float, growth: float, count: int, share: float
) -> None:
    steps = Steps(3.0, first, growth, count)
    now = 3.0 + share * (steps.end - 3.0)
    done = steps.done_at(now)
    assert steps.end_of(done) <= now or done == 0
    assert done == count or steps.end_of(done + 1) > now


def test_an_interruption_waits_for_the_step_that_runs() -> None:
    steps = Steps(0.0, 10.0, 1.0, 5)  # ends after 10, 21, 33, 46, 60
    assert steps.cut(22.0)
    assert steps.end == pytest.approx(33.0)
    assert not steps.cut(22.0)
