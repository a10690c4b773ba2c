"""Limits of keys and users: how much comes in, over all proxies, at whatever times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.keys import AccountLimits
from kvmig.accounts.limits import MINUTE_S, OwnTally, RequestLimiter, SpendBucket, headers, let_in

TIMES = st.lists(st.floats(0, 300), min_size=1, max_size=300).map(sorted)


@given(st.integers(1, 60), TIMES, st.lists(st.integers(1, 5), min_size=1))
def test_in_no_window_more_requests_come_in_than_its_minutes_and_one_more_allow(
    rpm: int, times: list[float], sizes: list[int]
) -> None:
    door = RequestLimiter(AccountLimits(rpm=rpm))
    came = []
    for turn, now in enumerate(times):
        size = sizes[turn % len(sizes)]
        if let_in([door], now, size) is None:
            came.append((now, size))
            door.end_requests(size)
    for first, (began, _) in enumerate(came):
        for last in range(first, len(came)):
            minutes = (came[last][0] - began) / MINUTE_S
            requests = sum(size for _, size in came[first : last + 1])
            assert requests <= rpm * (minutes + 1) + 1e-6


def test_in_its_first_minute_a_proxy_lets_requests_in_at_the_limits_rate_alone() -> None:
    limits = RequestLimiter(AccountLimits(rpm=3), OwnTally(since=100.0))
    came = [now for now in range(100, 161) if let_in([limits], now) is None]
    assert came == [120, 140, 160]


def test_after_its_first_minute_a_minutes_requests_may_come_to_a_proxy_at_once() -> None:
    limits = RequestLimiter(AccountLimits(rpm=3), OwnTally(since=100.0))
    assert [let_in([limits], 160.0) is None for _ in range(4)] == [True, True, True, False]


def test_a_server_that_knows_less_than_a_proxy_does_not_forgive_what_is_owed() -> None:
    limits = RequestLimiter(AccountLimits(tpm=600))
    limits.bucket.adopt_level(1200, now=0.0)
    limits.bucket.adopt_level(600, now=30.0)
    assert limits.bucket.now(30.0) == 900


@given(st.integers(1, 100), TIMES)
def test_a_request_that_comes_when_it_was_told_to_is_let_in(rpm: int, times: list[float]) -> None:
    limits = RequestLimiter(AccountLimits(rpm=rpm))
    for now in times:
        refused = let_in([limits], now)
        if refused is not None:
            assert refused.again_s is not None
            assert let_in([limits], now + refused.again_s + 1e-6) is None
            return
        limits.end_requests()


@given(st.integers(1, 30), st.lists(st.integers(-8, 8)))
def test_never_more_requests_run_at_once_than_the_key_may_have(
    parallel: int, events: list[int]
) -> None:
    limits, running = RequestLimiter(AccountLimits(parallel=parallel)), 0
    for requests in events:
        if requests > 0:
            fits = running + requests <= parallel
            assert (let_in([limits], 0.0, requests) is None) == fits
            running += requests * fits
        elif running >= -requests:
            limits.end_requests(-requests)
            running += requests
        assert limits.tally.running() == running


@pytest.mark.parametrize("limits", [AccountLimits(parallel=3), AccountLimits(rpm=3)])
def test_a_call_of_more_sequences_than_the_limit_has_is_refused_for_good(
    limits: AccountLimits,
) -> None:
    refused = let_in([RequestLimiter(limits)], 0.0, 4)
    assert refused is not None
    assert refused.again_s is None
    assert "the call asks for 4 (n times its prompts): send fewer in a call" in refused.sentence


def test_a_key_that_owes_tokens_waits_until_a_minutes_rate_has_paid_them_off() -> None:
    limits = RequestLimiter(AccountLimits(tpm=600))
    limits.bucket.adopt_level(610, now=0.0)

    refused = let_in([limits], 0.0)

    assert refused is not None
    assert refused.again_s == pytest.approx(1.0)
    assert refused.sentence == "the API key may use 600 tokens per minute, try again in 1.0 s"
    assert let_in([limits], 1.1) is None


@given(st.integers(1, 10_000), st.lists(st.tuples(st.floats(0, 30), st.integers(0, 5_000))))
def test_what_was_spent_is_paid_off_at_the_rate_and_never_below_nothing(
    rate: int, spendings: list[tuple[float, int]]
) -> None:
    bucket, now = SpendBucket(rate), 0.0
    for pause_s, tokens in spendings:
        before = bucket.now(now)
        now += pause_s
        assert bucket.now(now) == pytest.approx(max(0.0, before - pause_s * rate / MINUTE_S))
        bucket.spend(tokens, now)


def test_headers_say_what_is_left_and_when_all_of_it_is_back() -> None:
    limits = RequestLimiter(AccountLimits(rpm=3, tpm=600))
    left = []
    for _ in range(4):
        let_in([limits], 0.0)
        left.append(dict(headers([limits], 0.0))[b"x-ratelimit-remaining-requests"])
    limits.bucket.adopt_level(100, 0.0)

    assert left == [b"2", b"1", b"0", b"0"]
    assert dict(headers([limits], 0.0)) == {
        b"x-ratelimit-limit-requests": b"3",
        b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"60.000s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"500",
        b"x-ratelimit-reset-tokens": b"10.000s",
    }


def test_changed_terms_keep_what_runs() -> None:
    limits = RequestLimiter(AccountLimits(parallel=2))
    assert let_in([limits], 0.0) is None

    limits.renew(AccountLimits(parallel=1))

    refused = let_in([limits], 0.0)
    assert refused is not None
    assert "may have 1 requests at once" in refused.sentence


def test_a_key_without_limits_is_shown_none() -> None:
    limits = RequestLimiter(AccountLimits())
    assert let_in([limits], 0.0) is None
    assert headers([limits], 0.0) == []


def test_whoever_one_limit_refuses_uses_nothing_of_another_one() -> None:
    key, user = (
        RequestLimiter(AccountLimits(rpm=10)),
        RequestLimiter(AccountLimits(parallel=1), name="the user bea"),
    )
    assert let_in([key, user], 0.0) is None

    refused = let_in([key, user], 0.0)

    assert refused is not None
    assert refused.sentence == (
        "the user bea may have 1 requests at once, try again when one has ended"
    )
    assert dict(headers([key, user], 0.0))[b"x-ratelimit-remaining-requests"] == b"9"
    assert (key.tally.running(), user.tally.running()) == (1, 1)


def test_headers_tell_of_the_limit_of_which_least_is_left() -> None:
    key, user = (
        RequestLimiter(AccountLimits(rpm=10, tpm=600)),
        RequestLimiter(AccountLimits(rpm=3, tpm=900)),
    )
    user.bucket.adopt_level(400, 0.0)

    told = dict(headers([key, user], 0.0))

    assert told[b"x-ratelimit-limit-requests"] == b"3"
    assert told[b"x-ratelimit-remaining-tokens"] == b"500"
