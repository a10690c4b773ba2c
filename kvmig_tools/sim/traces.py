"""Request traces from CSV files: `arrival_s,input_tokens,output_tokens`, plain or gzip."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from kvmig.core.errors import ConfigError
from kvmig_tools.sim.request import SimRequest

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
OPTIONAL = ("priority", "prefix", "prefix_tokens")
"""prefix: a name that requests with the same first `prefix_tokens` tokens have in common."""


def read(path: Path, most: int | None = None, rate: float = 0.0) -> Iterator[SimRequest]:
    """Its first `most` requests, one at a time.

    rate: requests a second to which the file's times are stretched; 0: as they are.
    Raises ConfigError with file, line and field: an unknown or missing column, a value that
    is no number or can't be, arrivals that go back.
    """
    last, stretch = 0.0, 1.0
    if rate:
        own = _own_rate(path, most)
        stretch = own / rate
    for index, (line, row) in enumerate(_rows(path)):
        if index == most:
            return
        arrival = _number(path, line, row, "arrival_s", 0.0)
        if arrival < last:
            raise _bad(path, line, "arrival_s", row["arrival_s"], f"at least {last:g}, as before")
        last = arrival
        yield SimRequest(
            index,
            arrival * stretch,
            _whole(path, line, row, "input_tokens", 1),
            _whole(path, line, row, "output_tokens", 1),
            _whole(path, line, row, "priority", None) if row.get("priority") else 0,
            row.get("prefix", ""),
            _whole(path, line, row, "prefix_tokens", 0) if row.get("prefix_tokens") else 0,
        )


def _own_rate(path: Path, most: int | None) -> float:
    """Requests a second. Raises ConfigError if the file spans no time."""
    count, end = 0, 0.0
    for request in read(path, most):
        count, end = count + 1, request.arrival
    if end <= 0:
        raise ConfigError(f"--rate can't be had: all requests of {path} arrive at once")
    return (count - 1) / end


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with _open(path) as file:
            reader = csv.reader(file)
            header = next(reader, [])
            _check_header(path, header)
            for row in reader:
                if len(row) != len(header):
                    raise ConfigError(
                        f"{path}:{reader.line_num}: {len(row)} values, must be {len(header)}:"
                        f" {','.join(header)}"
                    )
                yield reader.line_num, dict(zip(header, row, strict=True))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {error}") from error


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _check_header(path: Path, header: list[str]) -> None:
    allowed = f"{','.join(COLUMNS)}, and perhaps {','.join(OPTIONAL)}"
    for name in COLUMNS:
        if name not in header:
            raise ConfigError(f"{path}:1: column {name} is missing, must be {allowed}")
    for name in header:
        if name not in COLUMNS and name not in OPTIONAL:
            raise ConfigError(f"{path}:1: unknown column {name!r}, must be {allowed}")
        if header.count(name) > 1:
            raise ConfigError(f"{path}:1: column {name} is there twice, must be {allowed}")


def _number(path: Path, line: int, row: dict[str, str], field: str, least: float) -> float:
    allowed = f"a number of at least {least:g}"
    try:
        value = float(row[field])
    except ValueError:
        raise _bad(path, line, field, row[field], allowed) from None
    if not least <= value < math.inf:
        raise _bad(path, line, field, row[field], allowed)
    return value


def _whole(path: Path, line: int, row: dict[str, str], field: str, least: int | None) -> int:
    allowed = "a whole number" + (f" of at least {least}" if least is not None else "")
    try:
        value = int(row[field])
    except ValueError:
        raise _bad(path, line, field, row[field], allowed) from None
    if least is not None and value < least:
        raise _bad(path, line, field, row[field], allowed)
    return value


def _bad(path: Path, line: int, field: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(f"{path}:{line}: {field} is {value!r}, must be {allowed}")
