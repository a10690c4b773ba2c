"""When a suspension is asked for, and over which tokens its pause is spread."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect
from math import nan
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.engines.base import StepCadence
from kvmig.engines.steps import limit_s
from kvmig.frontend.streams import MOST_S, DelayRamp
from kvmig.kvtransfer.measured import LeadTime, MeasuredPause, PauseTime
from kvmig.kvtransfer.messages import Reserve
from kvmig.kvtransfer.pause import (
    EARLY,
    MOST_STEPS,
    NEAR,
    PUT_OFF_STEPS,
    PauseSpread,
    drain_ms,
    due_ms,
    put_off_ms,
    spare_ms,
    spread,
)
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_cluster import Cluster, cluster
from tests.support.fake_engine import BLOCK_TOKENS, FakeEngine
from tests.support.waiting import until

STEP_MS = st.floats(1.0, 100.0)


def test_a_destination_that_rests_is_not_waited_for() -> None:
    assert put_off_ms(StepCadence(3.0, 10.0), StepCadence(0.0, 0.0), 2.0) == 0.0


def test_the_examples_of_the_docstring() -> None:
    assert put_off_ms(StepCadence(0.0, 10.0), StepCadence(3.0, 10.0), 2.0) == 11.0
    assert put_off_ms(StepCadence(0.0, 10.0), StepCadence(6.0, 10.0), 2.0) == 0.0
    assert put_off_ms(StepCadence(0.0, 10.0), StepCadence(0.0, 10.0), 2.0) > 0.0
    assert put_off_ms(StepCadence(0.0, 10.0), StepCadence(0.0, 10.0), 2.0, can_hold=True) == 0.0


def test_a_request_comes_when_its_step_has_ended_and_it_has_gone_its_way() -> None:
    assert due_ms(StepCadence(4.0, 10.0), 2.0) == pytest.approx(8.0)
    assert due_ms(StepCadence(24.0, 10.0), 2.0) == pytest.approx(8.0)  # two steps without a word
    assert due_ms(StepCadence(0.0, 0.0), 2.0) == 2.0


def test_where_steps_overlap_a_request_is_in_the_next_one_too() -> None:
    assert drain_ms(StepCadence(4.0, 10.0)) == pytest.approx(6.0)
    assert drain_ms(StepCadence(4.0, 10.0, 3.0)) == pytest.approx(16.0)
    assert due_ms(StepCadence(4.0, 10.0, 3.0), 2.0) == pytest.approx(18.0)
    assert due_ms(StepCadence(0.0, 0.0, 3.0), 2.0) == 2.0


def test_where_steps_overlap_a_suspension_is_asked_for_just_before_a_step_ends() -> None:
    assert spare_ms(StepCadence(2.0, 10.0, 3.0)) == pytest.approx(8.0 - EARLY * 10.0)
    assert spare_ms(StepCadence(8.0, 10.0, 3.0)) == 0.0
    assert spare_ms(StepCadence(2.0, 10.0)) == 0.0
    assert spare_ms(StepCadence(2.0, 0.0, 3.0)) == 0.0


def test_a_step_that_is_launched_early_wants_the_request_as_much_earlier() -> None:
    here = StepCadence(0.0, 10.0)
    assert put_off_ms(here, StepCadence(6.0, 10.0), 2.0) == 0.0
    assert put_off_ms(here, StepCadence(6.0, 10.0, 3.0), 2.0) > 0.0
    assert put_off_ms(here, StepCadence(3.0, 10.0, 3.0), 2.0) == 0.0


@given(STEP_MS, STEP_MS, st.floats(0, 1), st.floats(0, 1), st.floats(0.0, 20.0))
def test_whoever_suspends_when_told_comes_just_before_a_step(
    here_ms: float, there_ms: float, here_at: float, there_at: float, lead_ms: float
) -> None:
    here, there = (
        StepCadence(here_at * here_ms, here_ms),
        StepCadence(there_at * there_ms, there_ms),
    )
    ends = here_ms - here.since_ms % here_ms
    wait = put_off_ms(here, there, lead_ms)
    assert wait == 0.0 or wait > ends
    rest = -(there.since_ms + ends + lead_ms) % there_ms
    assert (rest <= NEAR * there_ms) == (wait == 0.0)


def test_the_time_on_the_way_is_learned_without_the_engines_part() -> None:
    lead = LeadTime()
    for _ in range(40):
        lead.observe(answered_ms=9.0, commit_ms=5.0)
    assert lead.ms == pytest.approx(4.0, abs=0.01)


class Stepping(FakeEngine):
    """As it says."""

    def __init__(self, cadence: StepCadence) -> None:
        super().__init__()
        self.now = cadence


def far_apart() -> tuple[FakeEngine, FakeEngine]:
    """No good moment comes within 16 steps of the source."""
    return Stepping(StepCadence(0.0, 10.0)), Stepping(StepCadence(0.0, 100_000.0))


async def test_a_suspension_is_put_off_for_so_many_steps_at_most() -> None:
    source, destination = far_apart()
    async with cluster(source=source, destination=destination) as them:
        report = await them.move()
        assert (report.state, them.owners()) == ("committed", "b")
        assert report.total_ms >= PUT_OFF_STEPS * 10.0
        assert them.b.engine.calls.count("grow") > 4  # asked how far it is, and again


def decoding_on(them: Cluster, tokens: int) -> list[tuple[str, str]]:
    """r gets so many tokens each time that the destination is asked once more; all engine calls."""
    calls: list[tuple[str, str]] = []
    for node in (them.a, them.b):

        async def note(called: str, name: str = node.name) -> None:
            calls.append((name, called))

        node.engine.before = note

    def decode(message: RpcMessage) -> bool:
        if isinstance(message, Reserve) and message.stage:
            them.a.engine.decode(them.a.engine.running["r"], tokens)
            them.a.migrations.stepped("r", tokens)
        return False

    them.b.drop = decode
    return calls


async def test_room_for_what_comes_while_it_is_put_off_is_taken_before_the_pause() -> None:
    source, destination = far_apart()
    async with cluster(source=source, destination=destination) as them:
        calls = decoding_on(them, tokens=1)
        assert (await them.move()).state == "committed"
        assert len(them.b.engine.running["r"].tokens) > 44 + 2 * BLOCK_TOKENS
        pause = calls[calls.index(("a", "suspend")) :]
        assert ("b", "grow") not in pause


async def test_one_that_outgrows_its_destination_while_it_is_put_off_is_never_suspended() -> None:
    source, destination = Stepping(StepCadence(0.0, 10.0)), FakeEngine(num_blocks=16)
    destination.now = StepCadence(0.0, 100_000.0)
    async with cluster(source=source, destination=destination) as them:
        decoding_on(them, tokens=2)
        report = await them.move()
        assert (report.reason, report.downtime_ms) == ("no_blocks", None)


async def test_a_client_that_leaves_meanwhile_ends_the_migration() -> None:
    source, destination = far_apart()
    async with cluster(source=source, destination=destination) as them:
        moving = asyncio.ensure_future(them.move())
        await until(lambda: "prepare" in them.b.engine.calls)
        them.a.migrations.cancel_request("r", "aborted_by_client")
        report = await moving
        assert (report.state, report.downtime_ms) == ("aborted", None)


class Steps:
    """Ends of an engine's steps, whose lengths vary by `jitter` of `ms`."""

    def __init__(self, seed: int, ms: float, jitter: float) -> None:
        source = random.Random(seed)
        self.ends = [source.uniform(0.0, ms)]
        while len(self.ends) < 400:
            self.ends.append(self.ends[-1] + ms * source.gauss(1.0, jitter))
        self._ms = ms

    def next(self, at: float) -> float:
        return self.ends[bisect(self.ends, at)]

    def cadence(self, at: float) -> StepCadence:
        return StepCadence(at - self.ends[bisect(self.ends, at) - 1], self._ms)


def wait_at_destination(
    seed: int, jitter: float, put_off: bool, can_hold: bool = False
) -> tuple[float, float]:
    """Of one request, and of a step there for it, in steps of the destination.

    Steps take 10.5 ms here and 10 ms there, the move is asked for at a random moment, and what
    the destination says of itself is as old as its last answer.
    """
    here, there = Steps(seed, 10.5, jitter), Steps(seed + 1000, 10.0, jitter)
    now = begin = 100.0 + random.Random(seed).uniform(0.0, 10.0)
    heard_at, heard = now, there.cadence(now)
    while put_off and now < begin + PUT_OFF_STEPS * 10.5:
        told = StepCadence(heard.since_ms + now - heard_at, heard.step_ms)
        wait = put_off_ms(here.cadence(now), told, 3.0, can_hold)
        if wait == 0.0:
            break
        answer, now = there.next(now), now + wait
        if answer < now:
            heard_at, heard = answer, there.cadence(answer)
    comes, due = here.next(now) + 3.0, now + due_ms(here.cadence(now), 3.0)
    limit = limit_s(0.01) * 1e3 if can_hold else -1.0
    begins = there.next(now)
    while begins < comes:
        if abs(due - begins) <= limit:  # what `StepHold` does
            held = min(limit, comes - begins)
            comes -= held  # all later steps there come so much later
            return (0.0 if comes == begins else there.next(comes) - comes) / 10.0, held / 10.0
        begins = there.next(begins)
    return (begins - comes) / 10.0, 0.0


@pytest.mark.parametrize(("jitter", "at_most"), [(0.01, 0.25), (0.05, 0.3), (0.1, 0.42)])
def test_a_request_that_is_put_off_waits_less_for_a_step_of_the_destination(
    jitter: float, at_most: float
) -> None:
    waits = [wait_at_destination(seed, jitter, put_off=True)[0] for seed in range(300)]
    at_random = [wait_at_destination(seed, jitter, put_off=False)[0] for seed in range(300)]
    assert fmean(at_random) > 0.45
    assert fmean(waits) < at_most


@pytest.mark.parametrize(("jitter", "at_most"), [(0.01, 0.1), (0.05, 0.15), (0.1, 0.22)])
def test_a_step_that_waits_a_little_spares_the_request_most_of_its_wait(
    jitter: float, at_most: float
) -> None:
    both = [wait_at_destination(seed, jitter, put_off=True, can_hold=True) for seed in range(300)]
    assert fmean(wait for wait, _ in both) < at_most
    assert fmean(held for _, held in both) < 0.1
    assert max(held for _, held in both) <= 0.3


def first_token_where_steps_overlap(seed: int, jitter: float, known: bool) -> float:
    """From the last token at the source to the first one at the destination, in steps of the
    destination, which makes steps of its own and launches each while the one before runs.

    known: whether both ends know that steps overlap.
    """
    launch_ms = 3.0 if known else 0.0
    here, there = Steps(seed, 10.5, jitter), Steps(seed + 1000, 10.0, jitter)

    def at(steps: Steps, now: float) -> StepCadence:
        return replace(steps.cadence(now), launch_ms=launch_ms)

    now = begin = 100.0 + random.Random(seed).uniform(0.0, 10.0)
    heard_at, heard = now, at(there, now)
    while now < begin + PUT_OFF_STEPS * 10.5:
        told = replace(heard, since_ms=heard.since_ms + now - heard_at)
        wait = put_off_ms(at(here, now), told, 3.0, can_hold=True)
        if wait == 0.0:
            break
        answer, now = there.next(now), now + wait
        if answer < now:
            heard_at, heard = answer, at(there, answer)
    now += spare_ms(at(here, now))
    left = here.next(here.next(now))
    comes, due = left + 3.0, now + due_ms(at(here, now), 3.0)
    limit = limit_s(0.01) * 1e3
    free = 10.0 - launch_ms if known else 0.0
    ends = there.next(now)
    while ends < comes:  # what `StepHold` does when a step has ended there
        until = ends + free + limit
        if -limit <= due - ends <= free + limit and comes <= until:
            break
        ends = there.next(ends)
    begins = max(there.next(ends), comes + 3.0)
    return (begins + 10.0 - left) / 10.0


@pytest.mark.parametrize(("jitter", "at_most"), [(0.01, 1.75), (0.05, 1.8), (0.1, 1.9)])
def test_where_steps_overlap_the_first_token_comes_a_step_sooner_if_both_ends_know(
    jitter: float, at_most: float
) -> None:
    known = [first_token_where_steps_overlap(seed, jitter, known=True) for seed in range(300)]
    not_known = [first_token_where_steps_overlap(seed, jitter, known=False) for seed in range(300)]
    assert fmean(not_known) > 2.5
    assert fmean(known) < at_most


PAUSES = st.floats(0.01, 1e4)


def test_a_pause_takes_as_many_steps_as_it_has_stretches() -> None:
    assert spread(5.0, 20.0, 0.1) == PauseSpread(5.0, 2.0, 3)


def test_an_engine_without_steps_and_a_share_of_nothing_spread_nothing() -> None:
    assert spread(5.0, 0.0, 0.1) is None
    assert spread(5.0, 20.0, 0.0) is None
    assert spread(0.0, 20.0, 0.1) is None


@given(PAUSES, st.floats(0.1, 1e3), st.floats(0.01, 1.0))
def test_the_last_token_before_the_pause_is_as_late_as_was_foretold(
    pause_ms: float, step_ms: float, share: float
) -> None:
    found = spread(pause_ms, step_ms, share)
    assert found is not None
    assert 1 <= found.steps <= MOST_STEPS
    assert found.pause_ms <= pause_ms
    ramp = DelayRamp(found.pause_ms / 1e3, found.stretch_ms / 1e3)
    assert ramp.delay_s(found.steps) == pytest.approx(min(MOST_S, found.pause_ms / 1e3))


@given(PAUSES, st.floats(0.01, 1e3), st.integers(1, 100))
def test_no_token_is_held_longer_than_the_pause_nor_stretched_by_more_than_was_said(
    pause_ms: float, stretch_ms: float, number: int
) -> None:
    ramp = DelayRamp(pause_ms / 1e3, stretch_ms / 1e3)
    delay, following = ramp.delay_s(number), ramp.delay_s(number + 1)
    assert 0.0 <= delay <= following <= min(MOST_S, pause_ms / 1e3)
    assert following - delay <= stretch_ms / 1e3 + 1e-9


def test_nonsense_holds_nothing_for_long() -> None:
    assert DelayRamp(-1.0, 1.0).delay_s(1) == 0.0
    assert 0.0 <= DelayRamp(nan, nan).delay_s(1) <= MOST_S


def test_a_pause_is_foretold_by_those_before_it() -> None:
    pause = PauseTime()
    for _ in range(50):
        pause.observe(True, MeasuredPause(1.0, 10.0, 5.0, first_token_ms=11.0), step_ms=10.0)
        pause.observe(False, MeasuredPause(0.0, 4.0, 2.0, first_token_ms=10.0), step_ms=10.0)
    assert pause.expected_ms(True, 10.0) == pytest.approx(1.0 + 2.0 + 5.0 + 1.0, rel=0.01)
    assert pause.expected_ms(False, 10.0) == pytest.approx(1.0 + 2.0, rel=0.01)


@pytest.mark.parametrize(("step_ms", "expected_ms"), [(6.0, 6.0), (0.5, 2.0)])
def test_the_first_pause_is_expected_to_be_a_step(step_ms: float, expected_ms: float) -> None:
    assert PauseTime().expected_ms(False, step_ms) == expected_ms


def test_pauses_that_differ_are_foretold_longer_than_the_average() -> None:
    pause = PauseTime()
    for number in range(200):
        first = 14.0 if number % 2 else 10.0
        pause.observe(False, MeasuredPause(0.0, 2.0, 2.0, first_token_ms=first), step_ms=10.0)
    assert pause.expected_ms(False, 10.0) > 6.0  # the longer ones


def test_a_first_step_that_is_quicker_than_a_usual_one_foretells_no_pause() -> None:
    pause = PauseTime()
    for _ in range(50):
        pause.observe(True, MeasuredPause(0.0, 2.0, 1.0, first_token_ms=5.0), step_ms=20.0)
    assert pause.expected_ms(True, 10.0) == pytest.approx(0.0, abs=0.01)


async def test_the_request_decodes_on_for_as_long_as_its_pause_is_spread() -> None:
    told: list[tuple[str, float, float]] = []
    since = 0.0

    def foretell(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        nonlocal since
        since = time.monotonic()
        told.append((request_id, pause_ms, stretch_ms))
        return True

    async with cluster(pause_spread=0.5) as them:
        them.a.foretell = foretell
        them.a.engine.now = StepCadence(0.0, 100.0)  # a step, by the first guess: two of them
        assert (await them.move()).state == "committed"
        assert time.monotonic() - since >= 0.2
        assert told == [("r", 100.0, 50.0)]


async def test_a_destination_keeps_its_reservation_however_long_the_pause_is_spread() -> None:
    async with cluster(timeout_ms=1000.0, pause_spread=0.0016) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: True
        them.a.engine.now = StepCadence(0.0, 80.0)  # a step, by the first guess: 16 of them
        assert (await them.move()).state == "committed"
        asked = [message for message in them.b.heard if isinstance(message, Reserve)]
        opening, *again = asked
        assert opening.export is not None
        assert len(again) >= 3


async def test_a_request_is_not_suspended_while_the_destination_prepares_for_it() -> None:
    """Commit would wait behind that, and the client for Commit."""
    preparing, prepared = asyncio.Event(), asyncio.Event()
    prepares = 0

    async def before(method: str) -> None:
        nonlocal prepares
        prepares += method == "prepare"
        if method == "prepare" and prepares == 2:  # the first one answers the stage before
            preparing.set()
            await prepared.wait()

    async with cluster(pause_spread=0.5) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: True
        them.a.engine.now = StepCadence(0.0, 50.0)
        them.b.engine.before = before
        moving = asyncio.create_task(them.move())
        await preparing.wait()
        await asyncio.sleep(0.2)
        assert "suspend" not in them.a.engine.calls
        prepared.set()
        assert ((await moving).state, them.owners()) == ("committed", "b")


async def test_nobody_waits_where_no_front_end_was_told() -> None:
    async with cluster(pause_spread=0.5) as them:
        them.a.foretell = lambda request_id, pause_ms, stretch_ms: False
        them.a.engine.now = StepCadence(0.0, 1000.0)
        assert (await them.move()).state == "committed"


@pytest.mark.parametrize("why", ["no spread", "it does not decode", "urgent"])
async def test_no_pause_is_foretold_that_is_not_spread_or_that_nobody_feels(why: str) -> None:
    told: list[str] = []

    def foretell(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
        told.append(request_id)
        return True

    source = FakeEngine()
    source.decoding = why != "it does not decode"
    source.now = StepCadence(0.0, 1000.0)
    async with cluster(source=source, pause_spread=0.0 if why == "no spread" else 0.5) as them:
        them.a.foretell = foretell
        assert (await them.move(urgent=why == "urgent")).state == "committed"
        assert not told
