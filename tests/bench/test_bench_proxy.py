"""What bench.proxy calls the cost of a proxy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import report
from bench.proxy import __main__ as proxy
from bench.proxy.__main__ import LONG_RUN, TARGETS, Sample, summarise

DIRECT = Sample("direct", 0, 0.0, 0.0, 5000.0, 90_000.0, 1.0, 2.0, 0.0)
KVMIG = Sample("kvmig", 0, 9.0, 6.0, 5000.0, 70_000.0, 1.5, 3.5, 15.0)
FRONTS = [
    {"proxy": name, "round": number, "delivered": delivered}
    for number, pair in enumerate([(100.0, 95.0), (200.0, 150.0), (100.0, 99.0)])
    for name, delivered in zip(("front", "front + kvmig"), pair, strict=True)
]


def test_a_proxys_figures_are_medians_and_what_it_adds_to_none() -> None:
    rounds = [
        replace(one, round=number, us_per_token=one.us_per_token * more)
        for number, more in enumerate((0.9, 1.0, 3.0))
        for one in (DIRECT, KVMIG)
    ]
    summary = summarise(rounds, FRONTS)
    assert summary["kvmig.us_per_token"] == 9.0
    assert summary["kvmig.added_first_p50_ms"] == pytest.approx(0.5)
    assert summary["kvmig.added_first_p99_ms"] == pytest.approx(1.5)
    assert "direct.added_first_p50_ms" not in summary
    assert summary["front_behind_over_alone"] == pytest.approx(0.95)
    assert report.missed(summary, TARGETS) == []


def test_the_most_that_was_not_tried_is_no_figure() -> None:
    summary = summarise([DIRECT, replace(KVMIG, most=None)], FRONTS)
    assert "kvmig.most" not in summary


def test_a_quick_run_holds_a_proxy_to_its_memory_only() -> None:
    options = report.parser(None, LONG_RUN).parse_args(["--quick"])
    result = report.begin("proxy", {})
    result.targets = dict(TARGETS)
    report.leave_out(result, options)
    assert [*result.targets] == ["kvmig.kib_per_stream"]


def test_more_streams_than_a_proxy_may_have_open_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "allow_files", lambda: 4096)
    with pytest.raises(SystemExit):
        proxy.main(["--streams=4000"])
    assert "--streams is 4000, must be at most" in capsys.readouterr().err
