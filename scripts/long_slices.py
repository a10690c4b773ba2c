"""Which part of the long tests a run of the check takes: another 32nd with each commit.

Tests that share an engine or a server stay together as a group: those of a file with the same
parameters, with the same part of them, or all. `tests/long_seconds.json` has how long each group
took when it was last recorded (`python -m scripts.check --long --record`), by which slices take
about as long as each other. A group that the file doesn't have is in one of the slices in which its
check runs anyway.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

SLICES = 32
SECONDS = Path(__file__).resolve().parent.parent / "tests" / "long_seconds.json"
WHOLE_FILES = frozenset(
    {
        "test_balloon",
        "test_browser_fleet",
        "test_browser_playground",
        "test_fleet_workers",
        "test_ray_serve",
        "test_serve_fleet_fits",
        "test_serve_fleet_isolation",
        "test_serve_fleet_ledger",
        "test_serve_kinds",
        "test_serve_moves",
        "test_serve_plugin_kinds",
        "test_serve_prompt_kills",
        "test_serve_session_kills",
        "test_serve_transformers",
        "test_serve_upgrade",
        "test_vllm_connectors",
        "test_vllm_sizes",
    }
)
"""All tests of these share a server, or its engines, whatever their parameters."""
OF_ENGINES = re.compile("async|sync")
SHARED = {
    "test_serve_gpus": re.compile("source|destination"),  # kills of all would be half an hour
    "test_serve_zoo": re.compile("(?!greedy|seeded).*?(?=-greedy|-seeded|$)"),
    "test_vllm_adapter": OF_ENGINES,
    "test_vllm_gate": OF_ENGINES,
    "test_vllm_kinds": OF_ENGINES,
    "test_vllm_offload": OF_ENGINES,
    "test_vllm_rerun": OF_ENGINES,
}
"""Tests of these whose parameters begin alike share a server, or its engines. The other parameters
of these files stand for themselves."""
START_S = 15.0
"""Of a check's process in a slice, whatever it runs: imports and the collection of tests."""
Seconds = Mapping[str, Mapping[str, float]]
"""By check and group."""


@dataclass(frozen=True)
class LongSlices:
    """Assigns each long test to one slice. numbers: the slice of each group, by check."""

    numbers: Mapping[str, Mapping[str, int]]

    def number_of(self, check: str, test: str) -> int:
        """The slice that runs a test of a check."""
        group = group_of(test)
        known = self.numbers.get(check, {}).get(group)
        homes = self.homes_of(check, file_of(group))
        return homes[crc32(group.encode()) % len(homes)] if known is None else known

    def homes_of(self, check: str, file: str | None = None) -> list[int]:
        """All slices that run some of a check's tests. file: the only one whose tests count, by its
        name without the suffix; all count without one, or where none of its tests is known."""
        known = self.numbers.get(check, {})
        of_file = {at for group, at in known.items() if file in (None, file_of(group))}
        return sorted(of_file or set(known.values())) or [crc32(check.encode()) % SLICES]

    def seconds_of(self, seconds: Seconds, number: int | None) -> dict[str, float]:
        """How long each check takes that has something in a slice. number: None for all slices."""
        sums: defaultdict[str, float] = defaultdict(lambda: START_S)
        for check, some in self.numbers.items():
            for group, at in some.items():
                if number in (None, at):
                    sums[check] += seconds[check][group]
        return sums


def group_of(test: str) -> str:
    """The file's name and the parameters, or what of them is shared, wherever the file lies.

    test: as pytest names it, a/b.py::NAME[PARAMETERS], or as its reports do, a.b::NAME[PARAMETERS].
    """
    file, _, name = test.partition("::")
    _, bracket, parameters = name.partition("[")
    stem = file.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    if stem in WHOLE_FILES:
        return stem
    parameters = parameters.removesuffix("]")
    if stem in SHARED and (shared := SHARED[stem].match(parameters)):
        parameters = shared[0]
    return f"{stem}[{parameters}]" if bracket else stem


def file_of(group: str) -> str:
    """The name of a group's file, without the suffix."""
    return group.partition("[")[0]


def assign_slices(seconds: Seconds) -> LongSlices:
    """Slices that take about as long as each other; equal ones for equal seconds.

    Each slice that has something of a check starts its process, so a group goes to the fullest one
    of its check that it still fits into. If it fits into none, it goes to the shortest of all.
    """
    tests_s = sum(sum(some.values()) for some in seconds.values())
    # A slice starts one check at least, and each check ends in the midst of a slice.
    full = (tests_s + START_S * (SLICES + sum(map(bool, seconds.values())))) / SLICES
    sums = [0.0] * SLICES
    numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
    groups = [
        (-took, check, group) for check, some in seconds.items() for group, took in some.items()
    ]
    for minus, check, group in sorted(groups):
        homes = set(numbers[check].values())
        ends = [
            total - minus + (0.0 if number in homes else START_S)
            for number, total in enumerate(sums)
        ]
        fits = sorted(number for number in homes if ends[number] <= full)
        number = max(fits, key=ends.__getitem__) if fits else ends.index(min(ends))
        sums[number] = ends[number]
        numbers[check][group] = number
    return LongSlices(numbers)


def read_seconds() -> Seconds:
    """As they were last recorded."""
    found: Seconds = json.loads(SECONDS.read_text())
    return found


def record_seconds(check: str, tests: Iterable[tuple[str, float | None]], whole: bool) -> None:
    """Keep how long a check's groups took.

    tests: with their seconds; None: it failed, and its group keeps those that it had. whole: the
    check has no other tests, so groups that it had are gone.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    failed: set[str] = set()
    for test, took in tests:
        if took is None:
            failed.add(group_of(test))
        else:
            sums[group_of(test)] += took
    known = read_seconds()
    before = known.get(check, {})
    kept = {group: took for group, took in before.items() if not whole or group in failed}
    new = {group: round(took, 1) for group, took in sums.items() if group not in failed}
    known = dict(sorted({**known, check: dict(sorted({**kept, **new}.items()))}.items()))
    (made := SECONDS.with_suffix(".new")).write_text(json.dumps(known, indent=1) + "\n")
    made.replace(SECONDS)  # a test of a lane beside may be reading it


def number_of_commit(folder: Path) -> int:
    """The slice of the commit that is checked out: the next one after its first parent's.

    Of a shallow clone, which doesn't know how many commits there were, one by the commit's name; 0
    without git.
    """
    if ask_git(folder, "rev-parse", "--is-shallow-repository") == "true":
        return int(ask_git(folder, "rev-parse", "HEAD"), 16) % SLICES
    return int(ask_git(folder, "rev-list", "--count", "--first-parent", "HEAD") or 0) % SLICES


def ask_git(folder: Path, *words: str) -> str:
    """What git answers; empty where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ("git", *words), cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
