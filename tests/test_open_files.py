"""Whether as many connections may be open as clients may wait."""

from __future__ import annotations

import resource

from kvmig.cli.environment import OPEN_FILES_SPARE, raise_open_files, too_few_files


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        assert raise_open_files() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_are_named_with_what_is_needed() -> None:
    assert too_few_files(10_000, 10_000, 1) == (
        "only 10000 open files are allowed (ulimit -Hn), --max-waiting 10000 may take 10500:"
        " connections beyond that wait unanswered; raise the one or lower the other"
    )


def test_front_ends_share_those_that_wait() -> None:
    assert too_few_files(5_000 + OPEN_FILES_SPARE, 10_000, 2) == ""


def test_no_limit_is_enough() -> None:
    assert too_few_files(resource.RLIM_INFINITY, 10_000, 1) == ""
