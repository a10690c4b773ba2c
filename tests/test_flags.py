"""kvmig's own flags: what isn't said elsewhere of them."""

from __future__ import annotations

import pytest

from kvmig.cli.flags import RENAMED, parse, parser


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
