"""Limits are the same however many proxies let requests in, and when one of them is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.accounts.keys import AccountLimits
from kvmig.accounts.limits import LimitExceeded, RequestLimiter, let_in
from kvmig.proxy.shared_tallies import SEATS, SLOTS, SharedTallies
from tests.support.examples import examples

PARALLEL = 3


class Clock:
    """Of all proxies."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Proxies:
    """Several on one file."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.clock = Clock()
        self.all = [SharedTallies(path, self.clock) for _ in range(count)]
        self.clock.now += 60.0  # what came before the first one is paid off

    def let_in(self, number: int, limits: AccountLimits, size: int = 1) -> LimitExceeded | None:
        with self.all[number].locked():
            return let_in([self._of(number, limits)], self.clock.now, size)

    def leave(self, number: int, size: int = 1) -> None:
        self._of(number, AccountLimits()).end_requests(size)

    def running(self, number: int = 0) -> int:
        return self.all[number].tally_of("key").running()

    def _of(self, number: int, limits: AccountLimits) -> RequestLimiter:
        return RequestLimiter(limits, self.all[number].tally_of("key"))

    def close(self) -> None:
        for one in self.all:
            one.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Proxies]:
    proxies = Proxies(tmp_path / "limits", 3)
    yield proxies
    proxies.close()


def test_one_call_at_once_comes_in_by_whichever_proxy(three: Proxies) -> None:
    for number in (0, 1, 2, 2, 1):
        assert three.let_in(number, AccountLimits(parallel=1)) is None
        assert all(three.let_in(other, AccountLimits(parallel=1)) for other in range(3))
        three.leave(number)


@examples(30)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.booleans()), max_size=60))
def test_a_client_within_its_limit_is_never_refused_and_never_more_come_in(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[int, int, bool]]
) -> None:
    proxies = Proxies(tmp_path_factory.mktemp("t") / "limits", 3)
    running: list[tuple[int, int]] = []
    for number, size, comes in events:
        if comes:
            fits = sum(one for _, one in running) + size <= PARALLEL
            assert (proxies.let_in(number, AccountLimits(parallel=PARALLEL), size) is None) == fits
            running += [(number, size)] * fits
        elif running:
            proxies.leave(*running.pop())
        assert proxies.running(number) == sum(one for _, one in running)
    proxies.close()


def test_a_minutes_requests_are_counted_over_all_proxies(three: Proxies) -> None:
    limits = AccountLimits(rpm=6)
    came = [three.let_in(turn % 3, limits) is None for turn in range(9)]
    assert came == [True] * 6 + [False] * 3
    three.clock.now += 10.0
    assert three.let_in(2, limits) is None
    assert three.let_in(0, limits) is not None


def test_a_limit_that_is_raised_counts_what_has_come(three: Proxies) -> None:
    assert three.let_in(0, AccountLimits(rpm=2), 2) is None
    assert three.let_in(1, AccountLimits(rpm=2)) is not None
    assert three.let_in(1, AccountLimits(rpm=20), 18) is None
    assert three.let_in(2, AccountLimits(rpm=20)) is not None


def test_what_a_proxy_had_let_in_is_given_back_when_it_ends(three: Proxies) -> None:
    assert three.let_in(0, AccountLimits(parallel=3), 2) is None
    assert three.let_in(1, AccountLimits(parallel=3)) is None
    three.all[0].close()
    assert three.running(2) == 1
    three.all[0] = SharedTallies(three.path, three.clock)
    assert three.let_in(0, AccountLimits(parallel=3), 2) is None
    assert three.running(1) == 3


HOLDS = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from kvmig.proxy.shared_tallies import SharedTallies
    tallies = SharedTallies(Path(sys.argv[1]))
    tallies.tally_of("key").enter(3)
    with tallies.locked():
        print("there", flush=True)
        time.sleep(60)
    """
)


def test_a_killed_proxy_gives_back_what_it_held_and_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    words = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"there\n"
            tallies = SharedTallies(path)
            limits = RequestLimiter(AccountLimits(parallel=3), tallies.tally_of("key"))
            with tallies.locked():  # it has the lock, and stands still: nobody waits for long
                assert let_in([limits], 0.0) is not None
        finally:
            os.kill(other.pid, signal.SIGKILL)
    with tallies.locked():
        assert let_in([limits], 0.0, 3) is None
    tallies.close()


def test_what_came_outlives_all_proxies_but_not_the_machine(tmp_path: Path) -> None:
    proxies = Proxies(tmp_path / "limits", 1)
    assert proxies.let_in(0, AccountLimits(rpm=5), 5) is None
    proxies.close()
    proxies.all = [SharedTallies(proxies.path, proxies.clock)]
    assert proxies.let_in(0, AccountLimits(rpm=5)) is not None
    proxies.close()
    proxies.clock.now = 5.0  # the machine's clock begins again
    proxies.all = [SharedTallies(proxies.path, proxies.clock)]
    assert proxies.let_in(0, AccountLimits(rpm=5)) is not None  # nobody knows what came just before
    proxies.clock.now = 66.0
    assert proxies.let_in(0, AccountLimits(rpm=5), 5) is None
    proxies.close()


def test_more_keys_than_slots_come_and_go(tmp_path: Path) -> None:
    clock = Clock()
    tallies = SharedTallies(tmp_path / "limits", clock)
    clock.now += 60.0
    for number in range(SLOTS + 500):
        limits = RequestLimiter(AccountLimits(rpm=1), tallies.tally_of(str(number)))
        assert let_in([limits], clock.now) is None
        limits.end_requests()
        clock.now += 0.01
    assert (
        let_in(
            [RequestLimiter(AccountLimits(rpm=1), tallies.tally_of(str(SLOTS + 499)))], clock.now
        )
        is not None
    )
    tallies.close()


def test_requests_that_came_without_a_slot_and_with_one_end_in_any_order(tmp_path: Path) -> None:
    clock = Clock()
    tallies = SharedTallies(tmp_path / "limits", clock)
    clock.now += 60.0
    others = [tallies.tally_of(str(number)) for number in range(SLOTS + 2_000)]
    for one in others:
        one.enter(1)
    key = tallies.tally_of("key")
    key.enter(3)
    for one in others:
        one.end_requests(1)
    key.enter(5)
    key.end_requests(5)
    key.end_requests(3)
    assert key.running() == 0
    tallies.close()


def test_one_proxy_too_many_is_refused(tmp_path: Path) -> None:
    every = [SharedTallies(tmp_path / "limits") for _ in range(SEATS)]
    with pytest.raises(OSError, match="there are 64 proxies already"):
        SharedTallies(tmp_path / "limits")
    for one in every:
        one.close()
