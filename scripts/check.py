"""Run every check of the house, one after the other, and say how each went.

`--lint` stops before the tests, `--long` adds those that are worth their minutes only now and
then. A failed check doesn't keep the next from running. At the end come the skipped tests with
their reasons and one closing line; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
NO_TESTS = 5
"""pytest's exit status where it found nothing to run."""

LINT: dict[str, list[str]] = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "mypy": ["mypy"],
    "bandit": ["bandit", "-q", "-r", "-c", "pyproject.toml", "kvmig"],
    "import floors": ["lint-imports", "--no-logo"],
}
PROOFS: dict[str, list[str]] = {"every order of the handshake": ["python", "-m", "kvmig.check"]}
# Two files at once: each keeps one core busy, and waits now and then.
BESIDE = ["pytest", "-q", "-n", "2", "--dist", "loadfile", "-m"]
ALONE = ["pytest", "-q", "-m"]
TESTS: dict[str, list[str]] = {
    "tests without engines": [*BESIDE, "not engine and not server"],
    "tests on engines": [*BESIDE, "engine and not long"],
    "tests on servers": [*ALONE, "server and not long"],
}
LONG: dict[str, list[str]] = {
    "long tests on engines": [*BESIDE, "engine and long"],
    "long tests on servers": [*ALONE, "server and long"],
}


@dataclass(frozen=True)
class Outcome:
    """How one check went."""

    name: str
    passed: bool
    seconds: float


def run(name: str, command: list[str]) -> Outcome:
    """Run one check with its output shown."""
    print(f"\n=== {name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    # An engine's threads and the test beside it would wait for each other's turns.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if "-n" in command else None
    words = [str(BIN / command[0]), *command[1:]]
    status = subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode
    passed = status == 0 or (command[0] == "pytest" and status == NO_TESTS)
    return Outcome(name, passed, time.monotonic() - start)


def tally(reports: list[Path]) -> tuple[Counter[str], list[str]]:
    """Tests by outcome, and a line for each skipped one with its reason, from JUnit reports."""
    counts: Counter[str] = Counter()
    skips: list[str] = []
    for report in reports:
        if not report.exists():
            continue
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            skipped = case.find("skipped")
            if skipped is not None:
                counts["skipped"] += 1
                where = f"{case.get('classname', '')}::{case.get('name', '')}"
                skips.append(f"{where}: {skipped.get('message', 'no reason given')}")
            elif case.find("failure") is not None or case.find("error") is not None:
                counts["failed"] += 1
            else:
                counts["passed"] += 1
    return counts, skips


def closing(outcomes: list[Outcome], counts: Counter[str], skips: list[str]) -> str:
    """What is said at the end."""
    lines = [f"  {'ok' if o.passed else 'FAILED':8}{o.name} ({o.seconds:.0f} s)" for o in outcomes]
    lines = ["", "=== Summary", *lines]
    if skips:
        lines += ["Skipped:", *(f"  {line}" for line in skips)]
    numbers = ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "All checks passed"
    total = sum(outcome.seconds for outcome in outcomes)
    return "\n".join([*lines, f"{verdict}; tests: {numbers}; {total:.0f} s."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lint", action="store_true", help="no tests")
    parser.add_argument("--long", action="store_true", help="the long tests, too")
    options = parser.parse_args()
    tests = {} if options.lint else {**TESTS, **(LONG if options.long else {})}
    checks = LINT if options.lint else {**LINT, **PROOFS}
    outcomes = [run(name, command) for name, command in checks.items()]
    with tempfile.TemporaryDirectory() as folder:
        reports = [Path(folder, f"{number}.xml") for number in range(len(tests))]
        outcomes += [
            run(name, [*command, f"--junitxml={report}"])
            for (name, command), report in zip(tests.items(), reports, strict=True)
        ]
        counts, skips = tally(reports)
    print(closing(outcomes, counts, skips), flush=True)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
