"""Turns under bandwidth caps."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import MigrationRefused
from kvmig.kvtransfer.bandwidth import BURST_S, BandwidthThrottle, FairShare

CHUNK = 1000


def run(share: FairShare, flows: dict[str, str], seconds: float, nbytes: int) -> Counter[str]:
    """All flows want to send all the time; bytes that each got."""
    sent: Counter[str] = Counter()
    now = 0.0
    for flow, pair in flows.items():
        share.request_turn(flow, pair, nbytes)
    while now <= seconds:
        for flow in share.grant(now):
            sent[flow] += nbytes
            share.request_turn(flow, flows[flow], nbytes)
        at = share.next_at(now)
        assert at is not None
        now = max(at, now + 1e-9)
    return sent


def test_without_caps_everybody_goes_at_once() -> None:
    share = FairShare(0, 0)
    for flow in "abc":
        share.request_turn(flow, "x", 1 << 40)
    assert share.grant(0.0) == ["a", "b", "c"]
    assert share.next_at(0.0) is None


def test_a_chunk_bigger_than_the_burst_goes_and_is_paid_off() -> None:
    share = FairShare(1000.0, 0)
    share.request_turn("a", "x", 1000)
    assert share.grant(0.0) == ["a"]
    share.request_turn("a", "x", 1)
    assert share.grant(0.5) == []
    at = share.next_at(0.5)
    assert at is not None
    assert abs(at - (1.0 - BURST_S)) < 1e-6
    assert share.grant(at) == ["a"]


@given(
    st.floats(1e3, 1e9),
    st.floats(0, 1e9).filter(lambda rate: rate == 0 or rate >= 1e3),
    st.integers(1, 5),
)
def test_no_more_goes_than_the_caps_allow_and_no_less(
    rate: float, pair_rate: float, flows: int
) -> None:
    share = FairShare(rate, pair_rate)
    chunk = max(1, int(rate / 50))
    sent = run(share, {str(n): str(n % 2) for n in range(flows)}, 1.0, chunk)
    pairs: Counter[str] = Counter()
    for flow, nbytes in sent.items():
        pairs[str(int(flow) % 2)] += nbytes
    assert sent.total() <= rate * (1 + BURST_S) + chunk * 1.01
    for nbytes in pairs.values():
        assert not pair_rate or nbytes <= pair_rate * (1 + BURST_S) + chunk * 1.01
    able = min(rate, pair_rate * len(pairs)) if pair_rate else rate
    assert sent.total() >= able * 0.98 - chunk


@given(st.integers(2, 6), st.integers(1, 4))
def test_flows_that_want_the_same_get_the_same(flows: int, scale: int) -> None:
    sent = run(FairShare(1e6, 0), {str(n): "x" for n in range(flows)}, 0.5, CHUNK * scale)
    assert max(sent.values()) - min(sent.values()) <= CHUNK * scale


def test_a_flow_with_big_chunks_gets_no_more_than_one_with_small_ones() -> None:
    share, sent, now = FairShare(1e6, 0), Counter[str](), 0.0
    sizes = {"big": 8000, "small": 500}
    for flow, size in sizes.items():
        share.request_turn(flow, "x", size)
    while now < 1.0:
        for flow in share.grant(now):
            sent[flow] += sizes[flow]
            share.request_turn(flow, "x", sizes[flow])
        now = max(share.next_at(now) or 0.0, now + 1e-6)
    assert abs(sent["big"] - sent["small"]) <= 2 * 8000 + 1e6 * BURST_S


def test_a_pair_in_debt_stands_in_nobodys_way() -> None:
    share = FairShare(0, 1000.0)
    share.request_turn("a", "slow", 10_000)
    assert share.grant(0.0) == ["a"]
    share.request_turn("a", "slow", 10)
    share.request_turn("b", "other", 10)
    assert share.grant(0.0) == ["b"]


def test_one_who_comes_late_is_not_paid_for_the_time_before() -> None:
    share = FairShare(1e6, 0)
    run(share, {"old": "x"}, 0.2, CHUNK)
    sent: Counter[str] = Counter()
    share.request_turn("new", "x", CHUNK)
    now = 0.2
    while now < 0.3:
        for flow in share.grant(now):
            sent[flow] += CHUNK
            share.request_turn(flow, "x", CHUNK)
        now = max(share.next_at(now) or 0.0, now + 1e-6)
    assert abs(sent["old"] - sent["new"]) <= 2 * CHUNK


def test_who_leaves_gets_no_turn_and_what_it_did_not_use_is_there_for_others() -> None:
    share = FairShare(1000.0, 0)
    share.request_turn("a", "x", 1000)
    share.grant(0.0)
    share.request_turn("b", "x", 10)
    share.charge("a", "x", -1000, 0.0)
    share.request_turn("c", "x", 10)
    share.forget("b")
    assert share.grant(0.0) == ["c"]


async def test_without_caps_a_turn_is_had_at_once() -> None:
    line = BandwidthThrottle(0.0, 0.0, timeout_s=1.0).line("a", "x")
    await line.reserve(1 << 40)
    line.commit(1 << 40)
    line.release()


async def test_those_who_wait_get_their_turns_in_order() -> None:
    throttle = BandwidthThrottle(1e6, 0.0, timeout_s=10.0)
    order: list[str] = []

    async def send(name: str) -> None:
        line = throttle.line(name, "x")
        for _ in range(3):
            await line.reserve(70_000)  # more than the burst
            line.commit(70_000)
            order.append(name)
        line.release()

    await asyncio.gather(*(send(name) for name in "abc"))
    assert sorted(order[:3]) == sorted(order[-3:]) == ["a", "b", "c"]


async def test_a_turn_is_waited_for_no_longer_than_the_time_out() -> None:
    throttle = BandwidthThrottle(1.0, 0.0, timeout_s=0.02)
    first, second = throttle.line("a", "x"), throttle.line("b", "x")
    await first.reserve(1000)
    with pytest.raises(MigrationRefused, match=r"no bandwidth for 5 bytes within 0\.02 s"):
        await second.reserve(5)
    first.release()
    await second.reserve(5)


async def test_a_wait_that_is_given_up_holds_up_nobody() -> None:
    throttle = BandwidthThrottle(1.0, 0.0, timeout_s=10.0)
    first, second, third = (throttle.line(name, "x") for name in "abc")
    await first.reserve(1000)
    waiting = asyncio.create_task(second.reserve(1000))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    first.release()
    await third.reserve(5)


async def test_a_turn_in_hand_serves_the_next_chunk() -> None:
    throttle = BandwidthThrottle(1.0, 0.0, timeout_s=0.02)
    line = throttle.line("a", "x")
    await line.reserve(10)
    await line.reserve(10)
    line.commit(10)
    with pytest.raises(MigrationRefused):
        await line.reserve(10)
