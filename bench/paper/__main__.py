"""`python -m bench.paper`: simulate the paper's evaluation and write docs/paper.md.

    python -m bench.paper                 # all loads
    python -m bench.paper --one-load      # the middle one of each workload's
    python -m bench.paper --quick         # and short runs

Results are written as they come. With --reuse, those that are there are not simulated again:
so a run that was ended goes on, and more loads are added to fewer. How our own policy does
against the others is in `python -m bench.policies`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench import report
from bench.paper import aims, large, loads, priorities, scaling, single
from bench.paper.scope import QUICK, Results, Scope, Section
from kvmig_tools.sim.run import Finished, Result, Run, simulate_all

SECTIONS: tuple[Section, ...] = (single, loads, priorities, scaling, large)
QUICK_NOTE = "\nRuns so short end before queues have grown: their figures aren't the paper's.\n"
ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if --check finds a target missed."""
    args = _parser().parse_args(argv)
    scope = QUICK if args.quick else Scope(one_load=args.one_load)
    docs = args.docs or (ROOT / "build" / "paper" if args.quick else ROOT / "docs")
    file = args.results or (docs if args.quick else ROOT / "bench" / "results") / "paper.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    known = read(file) if args.reuse and file.exists() else {}
    results = simulate(scope, known, args.workers, file)
    write(scope, results, docs)
    print(docs / "paper.md")
    result = report.begin("paper", {"seeds": scope.seeds, "requests": scope.requests})
    result.summary, result.targets = aims.summary(scope, results), aims.targets(scope)
    return report.finish(result, args)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__, aims.LONG_RUN)
    add = parser.add_argument
    add("--one-load", action="store_true", help="one load a workload")
    add("--docs", type=Path, help="folder of paper.md (default: docs; quick: build/paper)")
    add("--results", type=Path, help="raw figures (default: bench/results/paper.jsonl)")
    add("--reuse", action="store_true", help="simulate only what --results lacks")
    add("--workers", type=int, help="processes (default: one a core)")
    return parser


def read(file: Path) -> dict[Run, Result]:
    """Results of an earlier time; a last line that was cut off is left out."""
    *lines, _ = file.read_bytes().split(b"\n")
    known = [msgspec.json.decode(line, type=Result) for line in lines]
    return {one.run: one for one in known}


def simulate(scope: Scope, known: Results, workers: int | None, file: Path) -> dict[Run, Result]:
    """All runs of all sections, each once; those known are taken as they are.

    Results go to `file` as they come.
    """
    wanted = list(
        dict.fromkeys(
            one for section in SECTIONS for run in section.runs(scope) for one in scope.seeded(run)
        )
    )
    results = dict(known)
    runs = [run for run in wanted if run not in known]
    with report.progress() as progress, file.open("wb") as written:
        bar = progress.add_task("simulated", total=len(runs))

        def keep(result: Result) -> None:
            results[result.run] = _short(result)
            written.write(msgspec.json.encode(results[result.run]) + b"\n")
            written.flush()

        def done(finished: Finished) -> None:
            keep(finished.result)
            progress.advance(bar)

        for result in known.values():
            keep(result)
        simulate_all(runs, done, workers, sample_s=5.0)
    return {run: results[run] for run in wanted}


def write(scope: Scope, results: Results, docs: Path) -> None:
    """docs/paper.md and docs/paper/*.png."""
    pictures = docs / "paper"
    pictures.mkdir(parents=True, exist_ok=True)
    parts = [section.report(scope, results, pictures) for section in SECTIONS]
    (docs / "paper.md").write_text(_head(scope) + "\n" + "\n".join(parts), encoding="utf-8")


def _head(scope: Scope) -> str:
    loads = ", the middle one of each workload's loads" if scope.one_load else ""
    return (
        "# The paper's evaluation, simulated\n\n"
        f"Written by `python -m bench.paper{_flag(scope)}` from `paper.jsonl`:"
        f" {len(scope.seeds)} seeds, {min(scope.requests, 10_000):,} requests per run unless"
        f" stated otherwise{loads}. The models:"
        " [simulation.md](simulation.md). The paper is Llumnix (OSDI'24); its points are read"
        " from its Figure 11 (`bench/paper/fig11_points.csv`).\n"
        + (QUICK_NOTE if scope == QUICK else "")
    )


def _flag(scope: Scope) -> str:
    if scope == QUICK:
        return " --quick"
    return " --one-load" if scope.one_load else ""


def _short(result: Result) -> Result:
    """Six digits are enough."""

    def short(figures: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.6g}") for name, value in figures.items()}

    return msgspec.structs.replace(
        result, figures=short(result.figures), high=short(result.high), normal=short(result.normal)
    )


if __name__ == "__main__":
    sys.exit(main())
