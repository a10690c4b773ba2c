"""kvmig's own flags: what isn't said elsewhere of them."""

from __future__ import annotations

import pytest

from kvmig.launcher.flags import RENAMED, parse, parser


def test_a_renamed_flag_is_taken_under_its_old_name_and_says_so(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config, rest, _ = parse(["MODEL", "--silent-after", "7", "--spread=0.5", "--port", "1"])
    assert (config.faults.heartbeat_timeout_s, config.migration.pause_spread) == (7.0, 0.5)
    assert rest == ["MODEL", "--port", "1"]
    assert capfd.readouterr().err.splitlines() == [
        "kvmig: --silent-after is deprecated, use --heartbeat-timeout",
        "kvmig: --spread is deprecated, use --pause-spread",
    ]


def test_no_old_name_of_a_flag_is_shown_or_means_something_else() -> None:
    flags = {flag for action in parser()._actions for flag in action.option_strings}
    assert flags.issuperset(RENAMED.values())
    assert flags.isdisjoint(RENAMED)


def test_an_instances_unit_goes_by_its_own_name_then_by_where_it_is_in_a_placement() -> None:
    flags = ["--unit=/run/u", "--unit=i1: /run/one", "--unit=left: /run/left", "--unit=0:1: /run/g"]
    unit = parse(["MODEL", *flags])[0].unit
    assert unit is not None
    asked = [("i0", ""), ("i0", "left"), ("i1", "left"), ("i2", "0:1"), ("i2", "right")]
    assert [unit.of(*one).path for one in asked] == [
        "/run/u", "/run/left", "/run/one", "/run/g", "/run/u",
    ]  # fmt: skip
