"""What bench.soak makes of a load, and what it holds it to."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from bench import report
from bench.chaos.answers import RIGHT, Verdict
from bench.chaos.clients import Ledger, Outcome
from bench.chaos.leaks import Holdings
from bench.soak import Watched, summarise, targets
from bench.soak_samples import FLAT, Sample, Whole

OUTPUT = "i0 starts\ni1 starts\nautoscaling: 1 more\ni2 starts\ni2 goes\ni2 is taken out\n"
SECONDS = 400.0


def seen(*outcomes: Outcome, grows: float = 0.0) -> Watched:
    processes = [
        Sample(at, 7, "front-end", 90.0, 100.0 + grows * at / SECONDS, 40, 9)
        for at in range(0, int(SECONDS), 20)
    ]
    cluster = [Whole(0.0, 2, 0, 0, 64.0), Whole(20.0, 3, 10, 4, 80.0)]
    ended = SimpleNamespace(ended=Counter({"committed": 12, "aborted: FINISHED": 3}))
    ledger = Ledger(sent=40, outcomes=[*outcomes], tokens=900)
    return Watched(
        ledger, cast("Any", ended), processes, cluster, Holdings(), Holdings(), Counter()
    )


def outcome(error: str = "", verdict: Verdict = RIGHT, gap_s: float = 0.2) -> Outcome:
    return Outcome(cast("Any", None), 1.0, error=error, verdict=verdict, gap_s=gap_s)


def test_a_load_without_a_fault_misses_nothing() -> None:
    summary = summarise(seen(outcome(), outcome(gap_s=0.7)), OUTPUT, SECONDS)
    assert (summary["requests_sent"], summary["longest_gap_s"]) == (40, 0.7)
    assert (summary["migrations_committed"], summary["migrations_aborted"]) == (12, 3)
    assert (summary["instances_added"], summary["instances_taken_out"]) == (1, 1)
    assert (summary["added_by_autoscaling"], summary["drained_by_autoscaling"]) == (1, 1)
    assert (summary["instances_most"], summary["shm_mib_most"]) == (3, 80.0)
    assert report.missed(summary, targets(summary)) == []


def test_wrong_answers_and_growth_are_missed_targets() -> None:
    wrong = Verdict("other tokens", lost=2, repeated=0)
    grows = 4 * FLAT["rss_mib"]
    summary = summarise(
        seen(outcome("broken"), outcome(verdict=wrong), grows=grows), OUTPUT, SECONDS
    )
    missed = {line.split(" is ")[0] for line in report.missed(summary, targets(summary))}
    assert missed == {"failed", "wrong", "tokens_lost", "front-end rss_mib growth"}
