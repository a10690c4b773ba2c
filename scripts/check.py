"""Run every check of the house in lanes beside each other, and say how each went.

`--lint` stops before the tests. Of the long tests each run takes a 32nd part, another one with each
commit (scripts/long_slices.py); `--slice K` takes the Kth, `--long` all of them, and `--record`
keeps how long they took. A failed check doesn't keep the next from running. What a check prints
comes whole, when it ends.

A run of all long tests takes hours, so the outcome of each check is kept when it ends, and so are
its seconds; `--long --resume` runs only the checks that have not passed yet with the very files
that are there now, and names the runs that the others passed in. Ctrl-C and SIGTERM end the tests
that run, which print what has failed so far; no further check begins.

Tests that failed are run once more, by themselves. One that passes then is flaky: the summary
names it, the first failure's text stays in the output, and the check passes as long as no more
than one test in 50 is. At the end come the slowest tests, the skipped ones with their reasons and
one closing line; the exit status is 1 if anything failed.

A process of pytest that ends without a report fails its check, whatever its exit status: the
summary has the signal or the status, the test that began last, and where each thread was if Python
has printed it, as it does of a test that hangs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

from kvmig.process.supervisor import how_it_ended
from kvmig_tools.check.scenarios import LIFE, SCENARIOS
from scripts.kept_outcomes import KeptOutcomes
from scripts.long_slices import (
    SECONDS,
    SLICES,
    LongSlices,
    assign_slices,
    group_of,
    number_of_commit,
    read_seconds,
    record_seconds,
)
from scripts.outcomes import Case, Outcome

HERE = ROOT = Path(__file__).resolve().parent.parent
"""The plugins of a check's pytest are in HERE; what is checked is in ROOT, another in its tests."""
BIN = Path(sys.executable).parent
SOME_FAILED = 1
NO_TESTS = 5
"""pytest's exit statuses: tests failed; it found nothing to run."""
ENDS_WHOLE = (0, SOME_FAILED, NO_TESTS)
"""Statuses with which a process of pytest has come to its end."""
TESTS_PER_FLAKY = 50
SLOWEST = 30
LANES, LONG_LANES = 3, 2
"""On two cores: of a slice's lanes there are always two that don't wait. All long tests are on real
servers mostly: with three lanes of those the load was 20 to 40, and starts ran out of time."""
STACKS = re.compile(r"^(Timeout \(.*\)!|Fatal Python error: .*)$", re.MULTILINE)
FRAME = re.compile(r"Timeout \(|Fatal Python error: |(Current t|T)hread 0x|  File |  \.\.\.|$")
"""How stacks begin, and each of their lines, as faulthandler prints them."""
MOST_FRAMES = 100
OF_ALL = re.compile(r"^pytestmark = (\[\n.*?^\]|[^\n]*)", re.MULTILINE | re.DOTALL)
"""The marks that all tests of a file have."""
MARK = re.compile(r"\bmark\.(\w+)")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "KVMIG_HYPOTHESIS": "ci",
    "PYTHONDONTWRITEBYTECODE": "",
}
"""Of tests: an engine's threads and the test beside it would wait for each other's turns; a check
that fails finds the same the next time; what one process has compiled serves the others, also where
the machine's environment says otherwise."""
LONG_ENVIRONMENT = {**ENVIRONMENT, "KVMIG_HYPOTHESIS": "patient"}


@dataclass(frozen=True)
class Check:
    """One command, or the tests that a mark expression picks."""

    name: str
    command: tuple[str, ...] = ("pytest", "-q")
    marks: str = ""
    naming: str = ""
    """A mark; files of tests that don't name it aren't even imported, which takes seconds."""
    sparing: tuple[str, ...] = ()
    """Marks; neither are files whose tests all have one of these."""
    files: str = "test_*.py"
    """Which of the files of tests, whatever folder they are in."""
    but: str = "-"
    """Which of them not."""
    must_pass: bool = True
    """Otherwise it only reports."""
    tree: str = ""
    """A version of vLLM in .vllm that stands in for the installed one."""
    slice: int | None = None
    """Of the check's tests only those in this slice."""


LINT = (
    Check("ruff check", ("ruff", "check", ".")),
    Check("ruff format", ("ruff", "format", "--check", ".")),
    Check("mypy", ("mypy",)),
    Check("import floors", ("lint-imports", "--no-logo")),
)
DRIFT = (
    Check("drift of the vLLM that is supported", ("python", "-m", "kvmig_tools.drift")),
    Check(
        "drift of the newest vLLM",
        ("python", "-m", "kvmig_tools.drift", "--newest"),
        must_pass=False,
    ),
)
NEXT = "0.33.0"
"""The other vLLM that is supported; its Python runs on the installed one's kernels. Long
checks upgrade to it under streams (tests/e2e/test_serve_upgrade.py), move all kinds of calls there
and back, and run all that its adapter has."""
FETCH = Check(
    f"vLLM {NEXT}, beside the installed one",
    ("python", "scripts/setup_env.py", "--dev", "--vllm", NEXT),
)
ADAPTER = ("pytest", "-q", "tests/engines/vllm/test_vllm_adapter.py")
ON_V2 = ("-p", "tests.support.quick_runner_v2")
KERNELS_OF_V2 = "tests/bench/test_v2_on_cpu.py"
V2 = (*ADAPTER, *ON_V2)
KINDS = (
    "tests/engines/vllm/test_vllm_kinds.py",
    "tests/engines/vllm/test_vllm_lora.py",
    "tests/engines/vllm/test_vllm_offload.py",
)
ALL_ON_V2 = Check("all of the adapter on model runner V2", (*V2, *KINDS), marks="engine")
NEXT_ON_V2 = Check(
    f"all of it on vLLM {NEXT}", (*V2, *KINDS, KERNELS_OF_V2), marks="engine", tree=NEXT
)
ALL_ON_NEXT = Check(
    f"all tests of the adapter on vLLM {NEXT}",
    # The test on a server takes another version's name; tests/e2e/test_serve_plugin_next.py serves.
    marks="not server and not alone",
    sparing=("server",),
    files="test_vllm_*.py",
    tree=NEXT,
)
CONFORMS = ("--pyargs", "kvmig.testing", "--engine", "kvmig.engines.vllm:factory", "-W", "ignore")
CONFORMS_ON_NEXT = Check(
    f"the conformance suite on vLLM {NEXT}",
    ("pytest", "-q", *CONFORMS),
    marks="not long",
    tree=NEXT,
)
CONFORMS_ON_V2 = Check(
    "the conformance suite on model runner V2",
    ("pytest", "-q", *ON_V2, *CONFORMS),
    marks="not long",
)
HANDSHAKE = "every order of the handshake"
CHECKER = ("python", "-m", "kvmig_tools.check")
ORDERS = Check(HANDSHAKE, ("python", "-m", "scripts.golden", "compare", "--only", "checker"))
LONG_ORDERS = (
    *(
        Check(f"{HANDSHAKE}, {one.name}", (*CHECKER, "--only", one.name))
        for one in SCENARIOS
        if one.long
    ),
    Check(f"{LIFE} with two clients", (*CHECKER, "--long", "--only", LIFE)),
)
SHORT = "not long and not alone"
LATER = ("long", "alone")
KINDS_OF_TESTS = ("engine", "server")
NEITHER = "not engine and not server"
FLEET_FILES = "test_serve_fleet*.py"
SERVE_FILES = "test_serve_*.py"
"""About half of the time of the long tests on servers: one lane would take the whole an hour."""
SERVERS = (
    Check(
        "tests on servers",
        marks=f"server and {SHORT}",
        naming="server",
        sparing=LATER,
        but=FLEET_FILES,
    ),
)
FLEETS = (
    Check(
        "tests on fleets",
        marks=f"server and {SHORT}",
        naming="server",
        sparing=LATER,
        files=FLEET_FILES,
    ),
)
ENGINES = (Check("tests on engines", marks=f"engine and {SHORT}", naming="engine", sparing=LATER),)
LIGHT = Check(
    "tests without engines",
    # The slowest takes a tenth of that; one that hangs would cost the whole check its time.
    ("pytest", "-q", "-o", "faulthandler_timeout=180"),
    marks=f"{NEITHER} and {SHORT}",
    sparing=(*KINDS_OF_TESTS, *LATER),
)
LIGHTS = tuple(
    replace(LIGHT, name=f"{LIGHT.name}, {names}", files=f"test_[{names}]*.py")
    for names in ("g-os-z", "fp-r", "a-e")  # the longest first
)
LONG_AGAIN = (ALL_ON_V2, CONFORMS_ON_V2, CONFORMS_ON_NEXT, NEXT_ON_V2, ALL_ON_NEXT)
"""Tests that run on the installed vLLM, and its model runner V1, too. Those on another version come
last: it may have to be fetched first."""
ALONE = (Check("tests that measure", marks="alone and not long", naming="alone"),)
LONG_MARKED = (
    Check(
        "long tests on servers, test_serve",
        marks="server and long",
        naming="server",
        files=SERVE_FILES,
        but=FLEET_FILES,
    ),
    Check(
        "long tests on servers, others",
        marks="server and long",
        naming="server",
        but=SERVE_FILES,
    ),
    Check("long tests on fleets", marks="server and long", naming="server", files=FLEET_FILES),
    Check("long tests on engines", marks="engine and long", naming="engine"),
    Check(
        "long tests without engines",
        marks=f"{NEITHER} and long",
        naming="long",
        sparing=KINDS_OF_TESTS,
    ),
)
LONG = (*LONG_MARKED, *LONG_AGAIN, *LONG_ORDERS)
LONG_NAMES = frozenset(check.name for check in LONG)
WITHOUT_TESTS = frozenset(check.name for check in LONG_ORDERS)


@dataclass(frozen=True)
class PytestRun:
    """What one process of pytest left. why: it ended in its midst, and how; empty: it didn't."""

    status: int
    cases: list[Case]
    why: str = ""


def cases_of(report: Path) -> list[Case]:
    """All tests of a JUnit report; none if it was never written."""
    if not report.exists():
        return []
    return [_case(one) for one in ElementTree.parse(report).getroot().iter("testcase")]


def run_of(status: int, report: Path, begun: Path) -> PytestRun:
    """What a process of pytest left. begun: the name of the test that began last.

    A process that ends in the midst of a test, by a signal or `os._exit`, writes no report. What it
    has printed is lost: pytest keeps it in a file until the test ends. Its status may be 0.
    """
    cases, whole = [], report.exists()
    try:
        cases = cases_of(report)
    except ElementTree.ParseError:
        whole = False  # it ended while it wrote
    if whole and status in ENDS_WHOLE:
        return PytestRun(status, cases)
    last = (
        f"the test that began last: {begun.read_text()}" if begun.exists() else "no test had begun"
    )
    without = "" if whole else " without a report"
    return PytestRun(status, cases, f"pytest ended{without} ({how_it_ended(status)}); {last}")


def stacks_in(output: str) -> str:
    """The last stacks that faulthandler has printed, the main thread's at their end; or nothing."""
    begins = [found.start() for found in STACKS.finditer(output)]
    if not begins:
        return ""
    lines = list(takewhile(FRAME.match, output[begins[-1] :].splitlines()))
    return "\n".join([lines[0], *lines[1:][-MOST_FRAMES:]]).rstrip()


def _case(element: ElementTree.Element) -> Case:
    name = f"{element.get('classname', '')}::{element.get('name', '')}"
    seconds = float(element.get("time", "0"))
    skipped = element.find("skipped")
    if skipped is not None:
        return Case(name, "skipped", seconds, skipped.get("message", "no reason given"))
    failed = element.find("failure") is not None or element.find("error") is not None
    return Case(name, "failed" if failed else "passed", seconds)


def files_of(check: Check) -> list[str]:
    """All files of tests that may hold some of the check's; none: its command has them.

    Of a slice's only those that may hold some of the slice's: the rest isn't imported.
    """
    if not check.naming and not check.sparing:
        return []
    slices = None if check.slice is None else assign_slices(read_seconds())
    return [
        str(file)
        for file in sorted((ROOT / "tests").rglob(check.files))
        if not file.match(check.but)
        and (slices is None or check.slice in slices.homes_of(check.name, file.stem))
        and _may_hold(file.read_text(), check)
    ]


def _may_hold(text: str, check: Check) -> bool:
    of_all = OF_ALL.search(text)
    marks = set(MARK.findall(of_all[0])) if of_all else set()
    named = not check.naming or f"mark.{check.naming}" in text
    return named and marks.isdisjoint(check.sparing)


def failed_in(cases: Iterable[Case]) -> list[str]:
    """Names, each once: a test may have failed in its call and in its teardown."""
    return list(dict.fromkeys(one.name for one in cases if one.how == "failed"))


def may_be_flaky(tests: int) -> int:
    """How many of so many tests may pass only when run again: 1 in 50 begun."""
    return -(-tests // TESTS_PER_FLAKY)


def after_retry(name: str, seconds: float, first: list[Case], again: list[Case]) -> Outcome:
    """What is to be said of a check whose failed tests were run again."""
    flaky = failed_in(first)
    tests = {one.name: one for one in [*first, *again]}
    steady = {one.name for one in again if one.how == "passed"} - set(failed_in(again))
    passed = set(flaky) <= steady and len(flaky) <= may_be_flaky(len(tests))
    return Outcome(
        name, passed, seconds, [*tests.values()], [one for one in flaky if one in steady]
    )


@dataclass
class Runner:
    """Runs checks, in threads of its user's; folder: for what they leave.

    ended: called with each outcome, one at a time.
    """

    folder: Path
    environment: dict[str, str]
    ended: Callable[[Outcome], object] = lambda _: None
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _running: set[int] = field(default_factory=set)
    _interrupted: bool = False
    _processor_s: defaultdict[Path, float] = field(default_factory=lambda: defaultdict(float))

    def lane(self, checks: Sequence[Check]) -> list[Outcome]:
        """One after the other."""
        return [self.run(check) for check in checks]

    def run(self, check: Check) -> Outcome:
        """One check; its output is printed when it ends."""
        if self._interrupted:
            why = "it did not begin: the run was interrupted"
            return Outcome(check.name, False, 0.0, must_pass=check.must_pass, why=why)
        folder = self.folder / check.name.replace(" ", "-")
        folder.mkdir()
        try:
            done = self._tested(check, folder) if check.marks else self._checked(check, folder)
            used = self._processor_s.pop(folder)
            stacks = stacks_in((folder / "output").read_text(errors="replace")) if done.why else ""
            outcome = replace(done, processor_s=used, stacks=stacks)
        finally:
            with self._ending:
                sys.stdout.buffer.write((folder / "output").read_bytes())
                sys.stdout.flush()
        with self._ending:
            print(f"=== {_line(outcome)}", flush=True)
            self.ended(outcome)
        return outcome

    def begin_no_more(self) -> None:
        """A signal's handler may call it."""
        self._interrupted = True

    def interrupt(self) -> None:
        """End what runs, as Ctrl-C does, and begin nothing more. A signal's handler may call it."""
        self.begin_no_more()
        for process_id in tuple(self._running):
            self._end(process_id)

    def _end(self, process_id: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGINT)

    def _checked(self, check: Check, folder: Path) -> Outcome:
        began = time.monotonic()
        status = self._call(check.command, folder, self.environment)
        seconds = time.monotonic() - began
        why = how_it_ended(status) if status < 0 else ""
        return Outcome(check.name, status == 0, seconds, must_pass=check.must_pass, why=why)

    def _tested(self, check: Check, folder: Path) -> Outcome:
        began = time.monotonic()
        first = self._pytest(check, (), folder, "first")
        seconds = time.monotonic() - began
        if first.why:
            return Outcome(check.name, False, seconds, first.cases, why=first.why)
        failed = failed_in(first.cases)
        if first.status != SOME_FAILED or not 0 < len(failed) <= may_be_flaky(len(first.cases)):
            return Outcome(check.name, first.status != SOME_FAILED, seconds, first.cases)
        alone = ("--last-failed", "--last-failed-no-failures=none")
        again = self._pytest(check, alone, folder, "again")
        seconds = time.monotonic() - began
        outcome = after_retry(check.name, seconds, first.cases, again.cases)
        if again.status == 0 and not again.why:
            return outcome
        return Outcome(check.name, False, seconds, outcome.cases, why=again.why)

    def _pytest(self, check: Check, flags: Sequence[str], folder: Path, which: str) -> PytestRun:
        report, begun = folder / f"{which}.xml", folder / f"{which}.begun"
        # A cache of its own says what failed here, not in the other lane.
        own: tuple[str, ...] = ("-o", f"cache_dir={folder / 'cache'}", f"--junitxml={report}")
        own = (*own, "-p", "tests.support.begun_tests", f"--begun-tests={begun}")
        if check.slice is not None:
            part = ("--long-slice", str(check.slice), "--long-check", check.name)
            flags = (*flags, "-p", "tests.support.long_slice", *part)
        words = [*check.command, *flags, "-m", check.marks, *own, *files_of(check)]
        # Its plugins are found by the path: pytest's own setting holds below its own root only.
        beside = {"PYTHONPATH": str(HERE)}
        if check.tree:
            beside["PYTHONPATH"] = f"{ROOT / '.vllm' / check.tree}{os.pathsep}{ROOT}"
            # A model is inspected again, for seconds, where another version has left its cache.
            beside["VLLM_CACHE_ROOT"] = str(ROOT / ".vllm" / f"{check.tree}-cache")
        status = self._call(words, folder, {**self.environment, **beside})
        return run_of(status, report, begun)

    def _call(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> int:
        with (folder / "output").open("ab") as output:
            output.write(f"\n=== {folder.name}: {' '.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._running.add(process.pid)
            if self._interrupted:  # just before it was there
                self._end(process.pid)
            _, status, used = os.wait4(process.pid, 0)
            self._running.discard(process.pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            self._processor_s[folder] += used.ru_utime + used.ru_stime
            return process.returncode


def slowest(outcomes: Sequence[Outcome], most: int = SLOWEST) -> list[str]:
    """Lines for the tests that took longest, over all checks."""
    cases = [case for outcome in outcomes for case in outcome.cases]
    longest = sorted(cases, key=lambda case: -case.seconds)[:most]
    return [f"{case.seconds:7.1f} s  {case.name}" for case in longest]


def slowest_files(outcomes: Sequence[Outcome], most: int = SLOWEST // 2) -> list[str]:
    """Lines for the files of tests that took longest, each in its check."""
    sums: defaultdict[str, float] = defaultdict(float)
    for outcome in outcomes:
        for case in outcome.cases:
            sums[f"{case.name.partition('::')[0]} ({outcome.name})"] += case.seconds
    longest = sorted(sums, key=lambda file: -sums[file])[:most]
    return [f"{sums[file]:7.1f} s  {file}" for file in longest]


def closing(outcomes: Sequence[Outcome], seconds: float) -> str:
    """What is said at the end. seconds: of all, from the first check's start."""
    cases = [case for outcome in outcomes for case in outcome.cases]
    lines = ["", "=== Summary", *(f"  {_line(one)}" for one in outcomes)]
    for one in outcomes:
        if one.stacks:
            lines += [f"Where {one.name} ended:", textwrap.indent(one.stacks, "  ")]
    if cases:
        lines += ["Slowest tests:", *(f"  {line}" for line in slowest(outcomes))]
        lines += ["Slowest files:", *(f"  {line}" for line in slowest_files(outcomes))]
    if skips := [f"  {case.name}: {case.why}" for case in cases if case.how == "skipped"]:
        lines += ["Skipped:", *skips]
    lines += [f"flaky: {test} failed, then passed" for one in outcomes for test in one.flaky]
    counts = Counter(case.how for case in cases)
    numbers = ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped"))
    failed = [outcome.name for outcome in outcomes if outcome.must_pass and not outcome.passed]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "All checks passed"
    return "\n".join([*lines, f"{verdict}; tests: {numbers}; {seconds:.0f} s."])


def order_of(part: Iterable[Check], seconds: Mapping[str, float]) -> tuple[tuple[Check, ...], ...]:
    """What lanes take, each when it is free: the longest first, so that they end together.

    One process each: a second one would import and collect the same again. part: of the long
    checks; seconds: how long each takes.
    """
    first, second, third = LIGHTS
    rest = [
        (SERVERS, 336.0),
        ((third,), 199.0),
        (FLEETS, 190.0),
        (LINT, 88.0),
        ((ORDERS,), 77.0),
        *(((check,), seconds[check.name]) for check in part),
    ]  # seconds of a run on two cores
    longest = sorted(rest, key=lambda one: -one[1])
    # The three longest. While the first of them fetches another version, nothing wants it yet.
    return ((FETCH, *DRIFT, *ENGINES), (first,), (second,), *(checks for checks, _ in longest))


def part_of_long(slices: LongSlices, number: int) -> tuple[Check, ...]:
    """What a slice takes of the long checks; lanes run them beside each other."""
    return tuple(
        replace(check, slice=number) for check in LONG if number in slices.homes_of(check.name)
    )


def long_tests(outcomes: Sequence[Outcome], number: int | None) -> str:
    """The long tests that ran, by name. number: of their slice; None: all were asked for."""
    which = "all of them" if number is None else f"slice {number} of {SLICES}, by the commit"
    lines = ["", f"=== Long tests, {which}"]
    for outcome in outcomes:
        if outcome.name in LONG_NAMES:
            groups = Counter(group_of(case.name) for case in outcome.cases)
            counts = [f"{group} ({count})" for group, count in sorted(groups.items())]
            lines.append(f"  {outcome.name}: {', '.join(counts) or 'whole'}")
    return "\n".join(lines)


def taken_over(earlier: Iterable[Outcome]) -> str:
    """The checks that don't run again, and which runs they passed in."""
    lines = [f"\n  {_line(one)}" for one in earlier]
    return "=== Taken over, for no file has changed since:" + ("".join(lines) or " nothing")


def record_long_tests(outcomes: Iterable[Outcome], whole: bool) -> None:
    """Keep how long each long test took that didn't fail; one that was skipped takes nothing.

    whole: the checks ran all their tests.
    """
    for outcome in outcomes:
        if outcome.name not in LONG_NAMES or outcome.why:
            continue
        # What failed or was cut off outside of any test is reported without a name.
        cases: Sequence[Case] = [one for one in outcome.cases if group_of(one.name)]
        if outcome.passed and outcome.name in WITHOUT_TESTS:
            cases = [Case("", "passed", outcome.seconds)]
        tests = [(one.name, None if one.how == "failed" else one.seconds) for one in cases]
        if tests:
            record_seconds(outcome.name, tests, whole)


def without(
    parts: Iterable[tuple[Check, ...]], earlier: Iterable[Outcome]
) -> list[tuple[Check, ...]]:
    """What is left for lanes to run. earlier: outcomes that are taken over."""
    names = {one.name for one in earlier}
    left = (tuple(check for check in part if check.name not in names) for part in parts)
    return [part for part in left if part]


def _line(outcome: Outcome) -> str:
    state = "ok" if outcome.passed else "FAILED" if outcome.must_pass else "told"
    times = f"{outcome.seconds:.0f} s, {outcome.processor_s:.0f} s of a core"
    earlier = outcome.taken_from and f", {outcome.taken_from}"
    return f"{state:8}{outcome.name} ({times}{earlier}){outcome.why and f': {outcome.why}'}"


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """arguments: of the command line, if not this process's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lint", action="store_true", help="no tests")
    long = parser.add_mutually_exclusive_group()
    long.add_argument("--long", action="store_true", help="all long tests, not a part")
    long.add_argument("--slice", type=int, choices=range(SLICES), help="which part of them")
    parser.add_argument("--resume", action="store_true", help="with --long: what has not passed")
    parser.add_argument("--record", action="store_true", help=f"write {SECONDS.name}")
    options = parser.parse_args(arguments)
    if options.resume and not options.long:
        parser.error("--resume goes on with a run of --long, which isn't asked for")
    return options


def run_checks(runner: Runner, number: int | None, earlier: Sequence[Outcome]) -> list[Outcome]:
    """number: of the slice of the long tests; None: all of them. earlier: is taken over."""
    seconds = read_seconds()
    slices = assign_slices(seconds)
    part = LONG if number is None else part_of_long(slices, number)
    parts = order_of(part, slices.seconds_of(seconds, number))
    with ThreadPoolExecutor(LONG_LANES if number is None else LANES) as pool:
        lanes = pool.map(runner.lane, without(parts, earlier))
        beside = [outcome for lane in lanes for outcome in lane]
    alone = [outcome for lane in without([ALONE], earlier) for outcome in runner.lane(lane)]
    return [*earlier, *beside, *alone]


def main() -> int:
    options = options_of()
    began = time.monotonic()
    kept = KeptOutcomes(ROOT) if options.long else None
    earlier: list[Outcome] = []
    if kept is not None and options.resume:
        earlier = [one for one in kept.passed() if one.name != FETCH.name]  # its folder may be gone
        print(taken_over(earlier), flush=True)
        if options.record:
            record_long_tests(earlier, whole=True)

    def ended(outcome: Outcome) -> None:
        if kept is not None and (why := kept.keep(outcome)):
            print(f"How {outcome.name} went isn't kept: {why}", flush=True)
        if options.record and options.long:
            record_long_tests([outcome], whole=True)

    with tempfile.TemporaryDirectory(prefix="kvmig-check-") as folder:
        runner = Runner(Path(folder), LONG_ENVIRONMENT if options.long else ENVIRONMENT, ended)
        # Ctrl-C also reaches what runs: a second one would keep fixtures from ending their servers.
        signal.signal(signal.SIGINT, lambda *_: runner.begin_no_more())
        signal.signal(signal.SIGTERM, lambda *_: runner.interrupt())
        if options.lint:
            outcomes = runner.lane(LINT)
        else:
            number = number_of_commit(ROOT) if options.slice is None else options.slice
            which = None if options.long else number
            outcomes = run_checks(runner, which, earlier)
            print(long_tests(outcomes, which))
            if options.record and which is not None:  # until here they say what the slice holds
                record_long_tests(outcomes, whole=False)
    print(closing(outcomes, time.monotonic() - began), flush=True)
    return 0 if all(one.passed or not one.must_pass for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
