"""What bench.soak measures now and then, and whether it grows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil

from bench.chaos.cast import Cast
from bench.chaos.place import Place
from kvmig_tools.served import Served

YOUNG_S = 30.0
"""Of a process that was seen for the first time: it has only begun."""
WARM = 0.25
"""Share of the time before anything counts."""
FLAT = {"rss_mib": 16.0, "fds": 4.0, "threads": 4.0}
"""Growth over the measured time that is not taken for one. Resident memory: what is counted by
shares changes with how many instances are forked from the same process."""


@dataclass(frozen=True)
class Sample:
    """One process at one time. at_s: since the load began; memory in MiB."""

    at_s: float
    pid: int
    part: str
    pss_mib: float
    rss_mib: float
    fds: int
    threads: int


@dataclass(frozen=True)
class Whole:
    """The cluster at one time."""

    at_s: float
    instances: int
    blocks_used: int
    requests: int
    shm_mib: float


def samples_of(place: Place, at_s: float) -> list[Sample]:
    """All processes, now; those that end meanwhile are left out."""
    found = []
    for part, pids in Cast.of(place).parts.items():
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                process = psutil.Process(pid)
                memory = process.memory_full_info()
                found.append(
                    Sample(
                        at_s, pid, part, round(memory.pss / (1 << 20), 2),
                        round(memory.rss / (1 << 20), 2), process.num_fds(),
                        process.num_threads(),
                    )
                )  # fmt: skip
    return found


def cluster_of(served: Served, place: Place, at_s: float) -> Whole:
    """Now. Raises httpx.HTTPError."""
    rows = served.get("instances")
    requests = len(served.get("requests"))
    size = 0
    for name in place.left_in_shm():
        with contextlib.suppress(FileNotFoundError):
            size += (place.shm / name).stat().st_size
    blocks = sum(row["blocks_used"] for row in rows)
    return Whole(at_s, len(rows), blocks, requests, round(size / (1 << 20), 2))


def growth(times: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """By a straight line through them: over the whole time, and an hour."""
    slope, _ = np.polyfit(times, values, 1)
    return float(slope * (times[-1] - times[0])), float(slope * 3600)


def steepest(samples: Iterable[Sample], seconds: float) -> dict[str, float]:
    """Of each thing, what grew most in any process that lived from the warm-up to the end.

    Where none of a part did (autoscaling takes any instance), in the one that lived longest,
    after a warm-up of its own.
    """
    series: dict[tuple[str, int], list[Sample]] = {}
    for one in samples:
        series.setdefault((one.part, one.pid), []).append(one)
    parts: dict[str, list[list[Sample]]] = {}
    for (part, _), rows in series.items():
        lived = _warm(rows, seconds)
        if len(lived) >= 3:
            parts.setdefault(part, []).append(lived)
    summary: dict[str, float] = {}
    for part, all_rows in parts.items():
        longest = max(map(_length, all_rows))
        enough = min(0.5 * (1 - WARM) * seconds, longest)
        summary[f"{part} longest minutes"] = longest / 60
        for rows in (one for one in all_rows if _length(one) >= enough):
            times = [one.at_s for one in rows]
            for name in FLAT:
                over, hourly = growth(times, [getattr(one, name) for one in rows])
                key = f"{part} {name}"
                summary[f"{key} growth"] = max(summary.get(f"{key} growth", over), over)
                summary[f"{key} an hour"] = max(summary.get(f"{key} an hour", hourly), hourly)
    return {name: round(value, 3) for name, value in sorted(summary.items())}


def _warm(rows: list[Sample], seconds: float) -> list[Sample]:
    """Those after the warm-up of all, and after its own."""
    own = rows[0].at_s + max(YOUNG_S, WARM * _length(rows))
    return [one for one in rows if one.at_s >= max(WARM * seconds, own)]


def _length(rows: list[Sample]) -> float:
    return rows[-1].at_s - rows[0].at_s
