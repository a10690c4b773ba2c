"""Which part of the long tests a run of the check takes: another 32nd with each commit.

Tests that share a file and a parametrisation share an engine or a server, so they stay together as
a group; so do all of some files. `tests/long_seconds.json` has how long each group took when all
long tests last ran (`python -m scripts.check --long --record`), by which slices take about as long
as each other. A group that the file doesn't have is in one of the slices in which its check runs
anyway.
"""

from __future__ import annotations

import json
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
        "test_serve_fleet_ledger",
        "test_serve_gpus",
        "test_serve_kinds",
        "test_serve_plugin_kinds",
        "test_serve_prompt_kills",
        "test_serve_session_kills",
        "test_vllm_connectors",
    }
)
"""All tests of these share a server, or its engines, whatever their parameters."""
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

    def homes_of(self, check: str, file: str = "") -> list[int]:
        """All slices that run some of a check's tests. file: the only one whose tests count, by its
        name without the suffix; all count where none of its tests is known."""
        known = self.numbers.get(check, {})
        of_file = {number for group, number in known.items() if file_of(group) == file}
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
    """The file's name and the parameters, wherever the file lies.

    test: as pytest names it, a/b.py::NAME[PARAMETERS], or as its reports do, a.b::NAME[PARAMETERS].
    """
    file, _, name = test.partition("::")
    _, bracket, parameters = name.partition("[")
    stem = file.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    return stem if stem in WHOLE_FILES else f"{stem}{bracket}{parameters}"


def file_of(group: str) -> str:
    """The name of a group's file, without the suffix."""
    return group.partition("[")[0]


def assign_slices(seconds: Seconds) -> LongSlices:
    """Slices that take about as long as each other; equal ones for equal seconds."""
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
        least = ends.index(min(ends))
        sums[least] = ends[least]
        numbers[check][group] = least
    return LongSlices(numbers)


def read_seconds() -> Seconds:
    """As they were last recorded."""
    found: Seconds = json.loads(SECONDS.read_text())
    return found


def record_seconds(tests: Iterable[tuple[str, str, float]]) -> None:
    """tests: check, name and seconds of each."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for check, test, took in tests:
        sums[check][group_of(test)] += took
    rounded = {
        check: {group: round(took, 1) for group, took in sorted(groups.items())}
        for check, groups in sorted(sums.items())
    }
    SECONDS.write_text(json.dumps(rounded, indent=1) + "\n")


def number_of_commit(folder: Path) -> int:
    """The slice of the commit that is checked out: the next one after its first parent's.

    Of a shallow clone, which doesn't know how many commits there were, one by the commit's name; 0
    without git.
    """
    if _ask_git(folder, "rev-parse", "--is-shallow-repository") == "true":
        return int(_ask_git(folder, "rev-parse", "HEAD"), 16) % SLICES
    return int(_ask_git(folder, "rev-list", "--count", "--first-parent", "HEAD") or 0) % SLICES


def _ask_git(folder: Path, *words: str) -> str:
    """What git answers; empty where there is no git, or no repository."""
    try:
        done = subprocess.run(
            ("git", *words), cwd=folder, capture_output=True, text=True, timeout=30, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
