"""Prometheus rules: what is recorded, and when an alert fires. Pure.

Times are parameters, so that tests see the same expressions fire within seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["page", "ticket"]
HARMLESS = (
    "finished", "aborted_by_client", "preempted", "started", "unknown_request", "superseded",
    "shutdown",
)  # fmt: skip
"""Reasons of aborted migrations that are the request's own: it ended, or needs no move any more."""


@dataclass(frozen=True)
class AlertTimes:
    """Windows and delays, as Prometheus writes durations, and thresholds in seconds."""

    fast: tuple[str, str] = ("1h", "5m")
    """The long and the short window of a fast burn."""
    slow: tuple[str, str] = ("6h", "30m")
    moves: str = "15m"
    """The window in which aborted moves are counted."""
    faults: str = "15m"
    """The window in which faults of the server's rounds are counted."""
    soon: str = "1m"
    """How long what should end by itself must last."""
    later: str = "5m"
    behind_s: int = 60
    """Longest time that the ledger may be behind."""

    @property
    def windows(self) -> tuple[str, ...]:
        """All windows of burn rates, each once."""
        return tuple(dict.fromkeys((*self.fast, *self.slow)))


@dataclass(frozen=True)
class LatencyGoal:
    """So many of all requests must be within a bound of a histogram."""

    name: str
    """In names of rules."""
    title: str
    """In names of alerts."""
    metric: str
    bound: str
    """A bucket's bound, in seconds, as `le` has it."""
    objective: float = 0.99

    @property
    def budget(self) -> float:
        """The part of requests that may be slower."""
        return round(1 - self.objective, 6)

    def recorded(self, window: str) -> str:
        """The name of the rule for a window."""
        return f"kvmig:{self.name}_error:ratio_rate{window}"


TTFT = LatencyGoal("request_ttft", "Ttft", "kvmig_request_ttft_seconds", "2.0")
TPOT = LatencyGoal("request_tpot", "Tpot", "kvmig_request_tpot_seconds", "0.1")
GOALS = (TTFT, TPOT)
FAST_BURN, SLOW_BURN = 14.4, 6
"""Multiples of the rate that uses a budget of 30 days up in 30 days: 2 % of it in an hour, 5 % in
six hours (Google's SRE workbook)."""
LEAST_MOVES = 3
"""Fewer aborted moves than that in a window are no alert."""
ABORTED_PART = 0.2


def rules_of(times: AlertTimes) -> dict[str, Any]:
    """The file of rules."""
    return {
        "groups": [
            {"name": "kvmig-recorded", "rules": recorded_rules(times)},
            {"name": "kvmig-alerts", "rules": alert_rules(times)},
        ]
    }


def recorded_rules(times: AlertTimes) -> list[dict[str, str]]:
    """Parts of requests that were slower than their goal, by model, in each window."""
    found = []
    for goal in GOALS:
        for window in times.windows:
            good = f'{goal.metric}_bucket{{le="{goal.bound}"}}'
            found.append(
                {
                    "record": goal.recorded(window),
                    "expr": (
                        f"1 - sum by (job, model) (rate({good}[{window}]))"
                        f" / (sum by (job, model) (rate({goal.metric}_count[{window}])) > 0)"
                    ),
                }
            )
    return found


def alert_rules(times: AlertTimes) -> list[dict[str, Any]]:
    """The alerts."""
    found = []
    for goal in GOALS:
        for speed, burn, windows, severity in (
            ("Fast", FAST_BURN, times.fast, "page"),
            ("Slow", SLOW_BURN, times.slow, "ticket"),
        ):
            found.append(_burn(goal, speed, burn, windows, severity))  # type: ignore[arg-type]
    aborted = f'outcome="aborted", reason!~"{"|".join(HARMLESS)}"'
    return [
        *found,
        alert(
            "KvmigMovesAborted",
            f"sum by (job, model) (rate(kvmig_migrations_total{{{aborted}}}[{times.moves}]))"
            f" / sum by (job, model) (rate(kvmig_migrations_total[{times.moves}]))"
            f" > {ABORTED_PART} and sum by (job, model)"
            f" (increase(kvmig_migrations_total{{{aborted}}}[{times.moves}])) >= {LEAST_MOVES}",
            "ticket",
            "Many migrations of {{ $labels.model }} are aborted.",
            "{{ $value | humanizePercentage }} of the migrations of {{ $labels.model }} were"
            " aborted, though their requests went on. The streams stay where they are. The"
            " dashboard Migrations has the reasons.",
        ),
        alert(
            "KvmigInstanceAiling",
            'kvmig_instance_state{state=~"silent|hung|failed|lost"} == 1',
            "page",
            "Instance {{ $labels.instance }} of {{ $labels.model }} is {{ $labels.state }}.",
            "Its requests run again on other instances, if there are any. GET"
            " /kvmig/v1/instances, `kvmig top` and the log have the reason.",
            times.soon,
        ),
        alert(
            "KvmigModelFailed",
            'kvmig_model_state{state="failed"} == 1',
            "page",
            "Model {{ $labels.model }} does not start.",
            "`kvmig model show` and `kvmig model logs` have the reason; `kvmig model wake` starts"
            " it again.",
            times.soon,
        ),
        alert(
            "KvmigNoRoom",
            "kvmig_model_lacks_room == 1",
            "ticket",
            "Nothing has room for model {{ $labels.model }}.",
            "Its requests wait. `kvmig model why-not` says what each worker and GPU lacks.",
            times.later,
        ),
        alert(
            "KvmigQuotaNearEnd",
            "kvmig_quota_left_ratio < 0.1",
            "ticket",
            "The quota of {{ $labels.kind }} {{ $labels.name }} is nearly used up.",
            "{{ $value | humanizePercentage }} of the tokens per {{ $labels.period }} are left.",
        ),
        alert(
            "KvmigUsageBehind",
            f"kvmig_usage_behind_seconds > {times.behind_s}",
            "page",
            "Usage does not reach the fleet's ledger.",
            "Front ends keep what they have counted, and calls go on; limits of tokens are late."
            " The server's log has the reason.",
            times.soon,
        ),
        alert(
            "KvmigRoundFaults",
            # A part's first fault makes its series, of which Prometheus has seen no increase.
            f"sum by (job, part) (increase(kvmig_round_faults_total[{times.faults}])) > 0"
            " or sum by (job, part) (kvmig_round_faults_total unless"
            f" kvmig_round_faults_total offset {times.faults}) > 0",
            "ticket",
            "The rounds of the fleet's server fail at {{ $labels.part }}.",
            "The error is unforeseen. What serves goes on, and the part is tried again at each"
            " round. The server's log has the error.",
        ),
        alert(
            "KvmigTargetDown",
            'up{job=~"kvmig.*"} == 0',
            "page",
            "{{ $labels.job }} at {{ $labels.instance }} shows no metrics.",
            "It is gone, or Prometheus's key is no admin's any more.",
            times.soon,
        ),
    ]


def _burn(
    goal: LatencyGoal, speed: str, burn: float, windows: tuple[str, str], severity: Severity
) -> dict[str, Any]:
    limit = round(burn * goal.budget, 6)
    long, short = map(goal.recorded, windows)
    what = f"{goal.title.upper()} of {goal.bound} s or less"
    return alert(
        f"Kvmig{goal.title}Burns{speed}",
        f"{long} > {limit} and {short} > {limit}",
        severity,
        f"Too many requests of {{{{ $labels.model }}}} miss the goal: {what}.",
        f"{{{{ $value | humanizePercentage }}}} of the requests of the last {windows[0]} were"
        f" slower; {goal.budget:.0%} may be.",
    )


def alert(
    name: str, expr: str, severity: Severity, summary: str, description: str, lasts: str = ""
) -> dict[str, Any]:
    """One alert. lasts: how long the expression must hold; empty: it fires at once."""
    found: dict[str, Any] = {"alert": name, "expr": expr}
    if lasts:
        found["for"] = lasts
    return found | {
        "labels": {"severity": severity},
        "annotations": {"summary": summary, "description": description},
    }
