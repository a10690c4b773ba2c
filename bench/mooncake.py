"""Mooncake's conversation trace as requests of the simulator.

FAST'25, Apache-2.0, kvcache-ai/Mooncake, FAST25-release/traces, commit 3b5a5941: 12,031 requests of
an hour, 4,658 of them later turns. A conversation here is requests that have more than the first
512 tokens in common, in steps of 512: its number, and how much each request has in common with
those before it, are in `mooncake_turns.csv.gz`.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path

from kvmig_tools.sim.request import SimRequest

TRACE = Path(__file__).with_name("mooncake_turns.csv.gz")


def turns_of_trace(speed: float, count: int) -> Iterator[SimRequest]:
    """The trace's first `count` requests. speed: how many times as fast they come."""
    with gzip.open(TRACE, "rt", encoding="utf-8", newline="") as file:
        for index, row in zip(range(count), csv.DictReader(file), strict=False):
            session = int(row["conversation"])
            yield SimRequest(
                index, int(row["arrival_ms"]) / 1e3 / speed, int(row["input_tokens"]),
                int(row["output_tokens"]), 0, f"c{session}", int(row["held_tokens"]), grows=True,
                session=session,
            )  # fmt: skip
