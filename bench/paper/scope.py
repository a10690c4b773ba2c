"""How much is simulated, and where results of runs are found again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import msgspec

from kvmig_tools.sim.run import Result, Run
from kvmig_tools.sim.workloads import PAPER_SEED

Results = Mapping[Run, Result]


@dataclass(frozen=True)
class Scope:
    """Seeds, requests a run, and which of the paper's loads."""

    seeds: tuple[int, ...] = (PAPER_SEED, 1, 2)
    requests: int = 100_000
    """At most, a run."""
    one_load: bool = False
    """Only the load in the middle of several."""
    most_instances: int = 1_000

    def some(self, loads: tuple[float, ...]) -> tuple[float, ...]:
        """All loads, or the one in the middle."""
        return (loads[len(loads) // 2],) if self.one_load else loads

    def seeded(self, run: Run) -> list[Run]:
        """The run under each seed."""
        return [
            msgspec.structs.replace(run, seed=seed, requests=min(run.requests, self.requests))
            for seed in self.seeds
        ]


QUICK = Scope(requests=1_500, one_load=True, most_instances=64)


class Section(Protocol):
    """A part of the evaluation: a module."""

    def runs(self, scope: Scope) -> list[Run]:
        """What to simulate, without seeds."""
        ...

    def report(self, scope: Scope, results: Results, pictures: Path) -> str:
        """Markdown; pictures go into the folder."""
        ...


Part = Callable[[Result], dict[str, float]]


def all_requests(result: Result) -> dict[str, float]:
    """Figures of all requests."""
    return result.figures


def values(
    scope: Scope, results: Results, run: Run, name: str, part: Part = all_requests
) -> list[float]:
    """A figure under each seed."""
    return [part(results[one])[name] for one in scope.seeded(run)]


def mean(scope: Scope, results: Results, run: Run, name: str, part: Part = all_requests) -> float:
    """A figure's mean over the seeds."""
    return fmean(values(scope, results, run, name, part))


def spread(several: Iterable[float], digits: int = 3) -> str:
    """Mean, least and most: "2.1 (1.8-2.4)"."""
    known = list(several)
    texts = [f"{one:.{digits}g}" for one in (fmean(known), min(known), max(known))]
    return f"{texts[0]} ({texts[1]}-{texts[2]})"


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown."""
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
