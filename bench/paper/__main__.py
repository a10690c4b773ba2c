"""`python -m bench.paper`: simulate the paper's evaluation and write docs/paper.md.

    python -m bench.paper                 # about 400 runs, docs/paper.md and its pictures
    python -m bench.paper --quick --docs /tmp/paper

With --reuse, runs whose results are in the file are not simulated again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.paper import large, loads, ours, priorities, scaling, single
from bench.paper.scope import QUICK, Results, Scope, Section
from kvmig.sim.run import Result, Run, simulate_all

SECTIONS: tuple[Section, ...] = (single, loads, priorities, scaling, large, ours)
QUICK_NOTE = "\nRuns so short end before queues have grown: their figures aren't the paper's.\n"
ROOT = Path(__file__).parents[2]


def main() -> int:
    """Exit code 0."""
    args = _parser().parse_args()
    scope = QUICK if args.quick else Scope()
    docs = args.docs or (ROOT / "build" / "paper" if args.quick else ROOT / "docs")
    file = args.results or (docs if args.quick else ROOT / "bench" / "results") / "paper.json"
    known = read(file) if args.reuse else {}
    results = simulate(scope, known, args.workers)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(_short(one)) for one in results.values()]
    file.write_bytes(b"[\n" + b",\n".join(lines) + b"\n]\n")
    write(scope, results, docs)
    print(docs / "paper.md")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one load a workload, short runs, under two minutes")
    add("--docs", type=Path, help="folder of paper.md (default: docs; quick: build/paper)")
    add("--results", type=Path, help="raw figures (default: bench/results/paper.json)")
    add("--reuse", action="store_true", help="simulate only what --results lacks")
    add("--workers", type=int, help="processes (default: one a core)")
    return parser


def read(file: Path) -> dict[Run, Result]:
    """Results of an earlier time."""
    known = msgspec.json.decode(file.read_bytes(), type=list[Result])
    return {one.run: one for one in known}


def simulate(scope: Scope, known: Results, workers: int | None) -> dict[Run, Result]:
    """All runs of all sections, each once; those known are taken as they are."""
    runs: list[Run] = []
    for section in SECTIONS:
        for run in section.runs(scope):
            runs += scope.seeded(run)
    wanted = list(dict.fromkeys(runs))
    runs = [run for run in wanted if run not in known]
    columns = TextColumn("simulated"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    results = dict(known)
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(runs))
        for finished in simulate_all(runs, lambda _: progress.advance(bar), workers, sample_s=5.0):
            results[finished.result.run] = finished.result
    return {run: results[run] for run in wanted}


def write(scope: Scope, results: Results, docs: Path) -> None:
    """docs/paper.md and docs/paper/*.png."""
    pictures = docs / "paper"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [section.report(scope, results, pictures) for section in SECTIONS]
    (docs / "paper.md").write_text(_head(scope) + "\n" + "\n".join(parts), encoding="utf-8")


def _head(scope: Scope) -> str:
    return (
        "# The paper's evaluation, simulated\n\n"
        f"Written by `python -m bench.paper{' --quick' if scope.quick else ''}` from"
        f" `bench/results/paper.json`: {len(scope.seeds)} seeds, at most"
        f" {scope.requests:,} requests a run. The models: [simulation.md](simulation.md). The"
        " paper is Llumnix (OSDI'24); its points are read off its Figure 11"
        " (`bench/paper/fig11_points.csv`).\n" + (QUICK_NOTE if scope.quick else "")
    )


def _short(result: Result) -> Result:
    """Six digits are enough."""

    def short(figures: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.6g}") for name, value in figures.items()}

    return msgspec.structs.replace(
        result, figures=short(result.figures), high=short(result.high), normal=short(result.normal)
    )


if __name__ == "__main__":
    sys.exit(main())
