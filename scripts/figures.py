"""Fill README's table of figures and docs/figures.md from `bench/results`.

README shows the `headlines`, docs/figures.md all. A figure that misses its target says so.
A result has `summary` (a flat map of figures), `targets` (for some of them `{"max": x}`,
`{"min": x}` or a plain text), `machine` and `versions` (maps, or plain text).
`--check` changes nothing and exits with 1 when one of them isn't current.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts import gpu_vllm
from scripts.headlines import HEADLINES, Headline, Source

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "figures.md"
RESULTS = ROOT / "bench" / "results"
BEGIN = "<!-- figures: begin (scripts/figures.py) -->"
END = "<!-- figures: end -->"
NONE_YET = "No results are committed yet."
NOT_MEASURED = "not yet measured"
MISSED = " (missed)"
PAGE_HEAD = """# All figures

Made by `make docs-figures` from the files in [bench/results](../bench/results), which also have
each sample; [bench/README.md](../bench/README.md) says how each is measured. A figure that misses
its target is marked.
"""


class FiguresError(Exception):
    """A result or README can't be read; the message names the file and what is wrong."""


def number(value: object) -> str:
    """A figure with three significant digits, but no digit of an integer dropped."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def target(wanted: object) -> str:
    """What a figure should reach: `{"max": 2}` reads "at most 2"."""
    if not isinstance(wanted, dict):
        return "" if wanted is None else number(wanted)
    words = {"max": "at most", "min": "at least"}
    return ", ".join(f"{words.get(key, key)} {number(value)}" for key, value in wanted.items())


def misses(value: object, wanted: object) -> bool:
    """Whether a figure is beyond its target."""
    if not isinstance(value, int | float) or not isinstance(wanted, dict):
        return False
    least, most = wanted.get("min", value), wanted.get("max", value)
    return not least <= value <= most


def measured(value: object, wanted: object) -> str:
    """A figure, and whether it misses its target."""
    return number(value) + MISSED * misses(value, wanted)


def described(about: object) -> str:
    """A machine or its versions in one line."""
    if isinstance(about, dict):
        return ", ".join(f"{key} {value}" for key, value in about.items())
    return str(about)


def section(name: str, result: dict[str, Any]) -> list[str]:
    """The lines of one result. Raises KeyError for a missing field."""
    targets = result["targets"]
    rows = [
        f"| {key.replace('_', ' ')} | {measured(value, targets.get(key))}"
        f" | {target(targets.get(key))} |"
        for key, value in result["summary"].items()
    ]
    about = f"{described(result['machine'])}; {described(result['versions'])}"
    return [f"**{name}** – {about}", "", "| figure | measured | target |", "|---|---:|---|", *rows]


def read(results: Path) -> dict[str, Any]:
    """All results by name, with that of vLLM on a GPU. Raises FiguresError."""
    found: dict[str, Any] = {}
    for path in results.glob("*.json"):
        try:
            found[path.stem] = json.loads(path.read_text())
        except ValueError as error:
            raise FiguresError(f"{path.name} is no result: {error!r}") from error
    samples = results / "h100"
    if samples.is_dir():
        try:
            found[gpu_vllm.NAME] = gpu_vllm.result(samples)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FiguresError(f"{samples.name} has no samples: {error!r}") from error
    return dict(sorted(found.items(), key=lambda one: f"{one[0]}.json"))


def table(results: Mapping[str, Any]) -> str:
    """All results as Markdown. Raises FiguresError."""
    parts: list[str] = []
    for name, result in results.items():
        try:
            parts.append("\n".join(section(name, result)))
        except (KeyError, AttributeError, TypeError) as error:
            raise FiguresError(f"{name}.json is no result: {error!r}") from error
    return "\n\n".join(parts) or NONE_YET


def headlines(results: Mapping[str, Any], lines: Iterable[Headline] = HEADLINES) -> str:
    """README's table. Raises FiguresError."""

    def found(source: Source | None, field: str, figure: str = "") -> object:
        if source is None or source.file not in results:
            return None
        try:
            return results[source.file][field].get(figure or source.figure)
        except (KeyError, AttributeError, TypeError) as error:
            raise FiguresError(f"{source.file}.json is no result: {error!r}") from error

    def cell(source: Source | None, wanted: object) -> str:
        if source is None:
            return ""
        value = found(source, "summary")
        if value is None:
            return NOT_MEASURED
        text = measured(value, wanted)
        if not source.out_of:
            return text
        return f"{text} of {number(found(source, 'summary', source.out_of))}"

    rows = []
    for one in lines:
        wanted = found(one.cpu, "targets") or found(one.gpu, "targets")
        cells = (one.says, cell(one.gpu, wanted), cell(one.cpu, wanted), target(wanted))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(["| | GPU | CPU | target |", "|---|---:|---:|---|", *rows])


def filled(readme: str, figures: str) -> str:
    """The README's text with `figures` between the markers. Raises FiguresError."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise FiguresError(f"README.md must have one line {BEGIN} and one {END}")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{figures}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    options = parser.parse_args(arguments)
    try:
        results = read(RESULTS)
        wanted = {
            README: filled(README.read_text(), headlines(results)),
            PAGE: f"{PAGE_HEAD}\n{table(results)}\n",
        }
    except FiguresError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.check:
        old = [
            path for path, text in wanted.items() if not path.exists() or path.read_text() != text
        ]
        for path in old:
            print(f"{path.name} isn't current: run `make docs-figures`", file=sys.stderr)
        return int(bool(old))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
