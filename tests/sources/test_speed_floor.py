"""Downloads that are too slow end."""

from __future__ import annotations

from pathlib import Path

from kvmig.sources.fetch import SourceFetch, Stage
from kvmig.sources.fetcher import too_slow
from kvmig.sources.files_folder import FilesFolder
from kvmig.sources.origins import origin_of
from kvmig.sources.source import parse_source
from kvmig.sources.speed_floor import LISTING_S, SpeedFloor


def looks(floor: SpeedFloor, bytes_s: float, seconds: int) -> list[str]:
    return [floor.check_speed(float(at), int(at * bytes_s)) for at in range(seconds)]


def test_a_download_that_drips_ends_after_a_window_with_both_numbers() -> None:
    said = looks(SpeedFloor(60, 1000), 10, 70)
    assert not any(said[:60])
    assert said[60] == (
        "it is too slow: 600 bytes came in 60 s, and the least is 1000 bytes/s; what came is kept"
    )


def test_a_download_at_the_least_speed_goes_on() -> None:
    assert not any(looks(SpeedFloor(60, 1000), 1000, 1000))


def test_one_that_was_fast_and_drips_later_ends_within_two_windows() -> None:
    floor = SpeedFloor(60, 1000)
    assert not any(looks(floor, 1e6, 100))
    said = [floor.check_speed(float(at), 100_000_000) for at in range(100, 300)]
    assert any(said[: 2 * 60])


def test_time_in_which_a_download_waits_for_room_does_not_count() -> None:
    floor = SpeedFloor(60, 1000)
    floor.check_speed(0, 0)
    floor.rest()
    assert floor.check_speed(1000, 0) == ""
    assert floor.check_speed(1050, 0) == ""
    assert floor.check_speed(1061, 0)


def test_each_stage_of_a_fetch_has_its_bound(tmp_path: Path) -> None:
    source = parse_source("hf:org/small")
    fetch = SourceFetch(source, origin_of(source), FilesFolder(tmp_path))
    floor = SpeedFloor(60, 1000)

    def at(stage: Stage, now: float) -> str:
        fetch.stage = stage
        return too_slow(fetch, floor, LISTING_S, now)

    assert at("listing", LISTING_S - 1) == ""
    assert at("listing", LISTING_S + 1) == f"its files are not listed within {LISTING_S:g} s"
    assert at("waiting", 1e6) == ""
    assert at("downloading", 1e6) == ""
    fetch.count.hashed(1_000_000)  # what came before is looked at again: that is no drip
    assert at("downloading", 1e6 + 61) == ""
    assert "it is too slow: 0 bytes came in" in at("downloading", 1e6 + 130)
