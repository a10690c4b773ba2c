"""What a soak calls growth."""

from __future__ import annotations

from bench.fleet_soak import Sample, grown

SECONDS = 60.0


def sample(at_s: float, pid: int, *, rss_mib: float = 60.0, fds: int = 20) -> Sample:
    return Sample(at_s, pid, "proxy", rss_mib, fds, 2)


def test_memory_is_that_of_the_process_that_grew_most() -> None:
    samples = [
        sample(0.0, 1), sample(60.0, 1, rss_mib=59.0), sample(0.0, 2), sample(60.0, 2, rss_mib=65.0)
    ]  # fmt: skip
    found = grown(samples, SECONDS)
    assert found["proxy rss_mib growth"] == 5.0
    assert (found["proxy rss_mib first"], found["proxy rss_mib last"]) == (60.0, 65.0)


def test_connections_that_come_to_another_process_are_no_growth() -> None:
    samples = [
        sample(0.0, 1, fds=28),
        sample(60.0, 1, fds=22),
        sample(0.0, 2),
        sample(60.0, 2, fds=26),
    ]
    assert grown(samples, SECONDS)["proxy fds growth"] == 0.0


def test_open_files_that_all_processes_gain_are_growth() -> None:
    samples = [sample(at_s, pid, fds=20 + int(at_s / 20)) for at_s in (0.0, 60.0) for pid in (1, 2)]
    assert grown(samples, SECONDS)["proxy fds growth"] == 6.0


def test_a_process_that_ended_or_came_meanwhile_is_left_out() -> None:
    samples = [sample(0.0, 1), sample(60.0, 2, fds=90)]
    assert grown(samples, SECONDS) == {}
