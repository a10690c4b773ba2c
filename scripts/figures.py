"""Fill README's table of figures and docs/figures.md from `bench/results/*.json`.

README shows the `headlines`, docs/figures.md all.
A result has `summary` (a flat map of figures), `targets` (for some of them `{"max": x}`,
`{"min": x}` or a plain text), `machine` and `versions` (maps, or plain text).
`--check` changes nothing and exits with 1 when one of them isn't current.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.headlines import HEADLINES, Headline, Source

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "figures.md"
RESULTS = ROOT / "bench" / "results"
BEGIN = "<!-- figures: begin (scripts/figures.py) -->"
END = "<!-- figures: end -->"
NONE_YET = "No results are committed yet."
NOT_MEASURED = {"cpu": "not yet measured", "gpu": "not yet measured on a GPU"}
PAGE_HEAD = """# All figures

Made by `make docs-figures` from the files in [bench/results](../bench/results), which also have
each sample; [bench/README.md](../bench/README.md) says how each is measured. A target that was
missed stays in the table.
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


def described(about: object) -> str:
    """A machine or its versions in one line."""
    if isinstance(about, dict):
        return ", ".join(f"{key} {value}" for key, value in about.items())
    return str(about)


def section(name: str, result: dict[str, Any]) -> list[str]:
    """The lines of one result. Raises KeyError for a missing field."""
    targets = result["targets"]
    rows = [
        f"| {key.replace('_', ' ')} | {number(value)} | {target(targets.get(key))} |"
        for key, value in result["summary"].items()
    ]
    about = f"{described(result['machine'])}; {described(result['versions'])}"
    return [f"**{name}** – {about}", "", "| figure | measured | target |", "|---|---:|---|", *rows]


def table(results: Iterable[Path]) -> str:
    """All results as Markdown. Raises FiguresError."""
    parts: list[str] = []
    for path in sorted(results):
        try:
            parts.append("\n".join(section(path.stem, json.loads(path.read_text()))))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise FiguresError(f"{path.name} is no result: {error!r}") from error
    return "\n\n".join(parts) or NONE_YET


def headlines(results: Path, lines: Iterable[Headline] = HEADLINES) -> str:
    """README's table. Raises FiguresError."""

    def found(source: Source | None, field: str) -> object:
        path = results / f"{source.file}.json" if source else results
        if source is None or not path.exists():
            return None
        try:
            return json.loads(path.read_text())[field].get(source.figure)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise FiguresError(f"{path.name} is no result: {error!r}") from error

    def cell(device: str, source: Source | None) -> str:
        if source is None:
            return ""
        value = found(source, "summary")
        return NOT_MEASURED[device] if value is None else number(value)

    rows = [
        f"| {one.says} | {cell('cpu', one.cpu)} | {target(found(one.cpu, 'targets'))} |"
        f" {cell('gpu', one.gpu)} |"
        for one in lines
    ]
    return "\n".join(["| | CPU | target | GPU |", "|---|---:|---|---:|", *rows])


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
        wanted = {
            README: filled(README.read_text(), headlines(RESULTS)),
            PAGE: f"{PAGE_HEAD}\n{table(RESULTS.glob('*.json'))}\n",
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
