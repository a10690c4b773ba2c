"""One download's states, and the room that it needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.sources import download_state
from kvmig.sources.disk_room import HeldFiles, find_room
from kvmig.sources.download_state import (
    FIRST_RETRY_S,
    LAST_RETRY_S,
    DownloadStatus,
    begin,
    fail,
    finish,
    is_due,
    seconds_left,
    sentence_of,
    take_list,
    take_progress,
)


def downloading(size: int = 1000, done: int = 0, now: float = 0.0) -> DownloadStatus:
    return take_list(begin(DownloadStatus(), now), "abc", size, done, now)


def test_a_download_goes_from_wanted_to_whole() -> None:
    status = DownloadStatus()
    assert is_due(status, 0)
    status = begin(status, 1)
    assert not is_due(status, 1)
    status = take_progress(take_list(status, "abc", 1000, 0, 2), 600, 5)
    assert (status.state, status.done, status.size) == ("downloading", 600, 1000)
    status = finish(status, 9)
    assert (status.state, status.done, status.revision) == ("whole", 1000, "abc")
    assert not is_due(status, 1e9)
    assert sentence_of(status, 9) == ""


def test_the_seconds_left_follow_the_rate_of_the_last_seconds() -> None:
    status = downloading()
    assert seconds_left(status, 0) is None
    for second in range(1, 11):
        status = take_progress(status, second * 10, second)
    assert seconds_left(status, 10) == 90
    assert sentence_of(status, 10) == "its files are downloaded: 100 B of 1.0 kB, some 90 s left"
    for second in range(11, 41):
        status = take_progress(status, 100 + (second - 10) * 20, second)
    assert seconds_left(status, 40) == 15


def test_a_download_that_stands_still_says_no_time() -> None:
    status = take_progress(downloading(), 500, 5)
    for second in range(6, 40):
        status = take_progress(status, 500, second)
    assert seconds_left(status, 40) is None


def test_failures_pause_longer_and_longer_and_a_byte_ends_the_row() -> None:
    status, pauses = downloading(), []
    for _ in range(7):
        status = fail(status, "no network", 100)
        pauses.append(status.retry_at - 100)
        assert not is_due(status, status.retry_at - 1)
        assert is_due(status, status.retry_at)
        status = begin(status, status.retry_at)
    assert pauses == [10, 20, 40, 80, 160, 300, 300]
    status = take_progress(take_list(status, "abc", 1000, 0, 500), 1, 501)
    assert fail(status, "no network", 600).retry_at == 600 + FIRST_RETRY_S
    assert status.why == ""


def test_what_would_fail_again_at_once_waits_long_but_not_for_somebody_who_asks() -> None:
    status = fail(begin(DownloadStatus(), 0), "no such model", 10, lasting=True)
    assert status.retry_at == 10 + LAST_RETRY_S
    assert "no such model; the next try is in 300 s" in sentence_of(status, 10)
    assert is_due(download_state.ask_again(status, 11), 11)


def test_who_asks_again_does_not_disturb_a_download() -> None:
    status = downloading(done=5)
    assert download_state.ask_again(status, 7) == status


SPARE = 10


@pytest.mark.parametrize(
    ("free", "coming", "said"),
    [
        (110, 0, ""),
        (109, 0, "the disk is too full: 100 bytes are needed, 99 are free, without 10"),
        (150, 60, "the disk is too full: 100 bytes are needed, 80 are free, without 10"),
    ],
)
def test_a_full_disk_is_found_before_the_download_begins(free: int, coming: int, said: str) -> None:
    found = find_room(100, 100, free, coming, [], spare=SPARE)
    assert found.refused.startswith(said)
    assert bool(found.refused) == bool(said)


def test_the_files_used_longest_ago_go_first_and_no_more_than_must() -> None:
    held = [HeldFiles("new", 50, 30), HeldFiles("old", 50, 10), HeldFiles("used", 50, 0, kept=True)]
    evicted = [
        find_room(size, size, 10_000, 0, held, limit=200, spare=SPARE).evicted
        for size in (50, 51, 100, 101)
    ]
    assert evicted == [(), ("old",), ("old",), ("old", "new")]


def test_files_that_stay_leave_a_reason_and_nobody_goes_in_vain() -> None:
    held = [HeldFiles("used", 90, 0, kept=True), HeldFiles("old", 10, 0)]
    found = find_room(50, 50, 10_000, 0, held, limit=100, spare=SPARE)
    assert found.evicted == ()
    assert found.refused.startswith("50 bytes are needed, 40 more than --model-files allows (100)")


def test_what_other_downloads_have_on_the_disk_counts_for_the_limit() -> None:
    found = find_room(60, 60, 10_000, 10, [], limit=100, spare=SPARE, begun=50)
    assert found.refused.startswith("60 bytes are needed, 20 more than --model-files allows (100)")


def test_callers_of_a_model_get_no_reason_that_names_its_place() -> None:
    status = download_state.fail(DownloadStatus(), "hf:org/secret is gated", 0)
    assert "org/secret" in sentence_of(status, 1)
    said = download_state.sentence_for_callers(status, 1)
    assert said == "its files can't be downloaded; the next try is in 9 s"


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 10), st.booleans()), max_size=8),
    st.integers(0, 300),
    st.integers(1, 400),
    st.integers(0, 100),
)
def test_no_limit_is_passed_and_nothing_that_stays_goes(
    rows: list[tuple[int, float, bool]], whole: int, limit: int, coming: int
) -> None:
    held = [HeldFiles(str(at), *row) for at, row in enumerate(rows)]
    found = find_room(whole, whole, 10_000, coming, held, limit, spare=0)
    gone = set(found.evicted)
    assert not any(one.kept for one in held if one.source in gone)
    left = sum(one.size for one in held if one.source not in gone)
    if not found.refused:
        assert left + coming + whole <= limit
        if gone:  # the last one was needed
            last = next(one for one in held if one.source == found.evicted[-1])
            assert left + last.size + coming + whole > limit
    else:
        assert gone == set()
