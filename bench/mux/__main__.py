"""`python -m bench.mux`: MuxServe's evaluation in the simulator; writes docs/mux-paper.md.

    python -m bench.mux             # all of it
    python -m bench.mux --quick     # a tenth of the requests, the page goes to build/
    python -m bench.mux --check     # exit 1 where a demand is missed
    python -m bench.mux --reuse     # go on with a run that was ended, or write the page anew

Everything is simulated on costs that were fitted to the step times that MuxServe's authors
measured. No GPU takes part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec

from bench import report
from bench.mux import figure5, figure7, page, small
from bench.mux.figure5 import CLUSTER, LONG_RUN, TARGETS, Cell, Row

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if --check finds a demand missed."""
    args = _parser().parse_args(argv)
    docs = args.docs or (ROOT / "build" if args.quick else ROOT / "docs")
    result = report.begin("mux", {"cluster": CLUSTER, "quick": args.quick})
    file = args.results or (docs if args.quick else ROOT / "bench" / "results") / "mux.jsonl"
    known = read(file) if args.reuse and file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = simulate(figure5.cells(args.quick), known, args.workers, file)
    seconds = 20.0 if args.quick else small.SEND_S
    nine, ten = small.figure_9(seconds), small.figure_10(seconds)
    eight = small.figure_8(seconds)
    seven = figure7.run_all(args.quick)
    lines = b"".join(msgspec.json.encode(one) + b"\n" for one in seven)
    file.with_name(f"{file.stem}-figure7.jsonl").write_bytes(lines)
    result.summary = {
        **figure5.summary(rows),
        **figure7.summary(seven),
        "figure_9_adbs_times_fcfs": nine["adbs"] / nine["fcfs"],
        "figure_9_adbs_times_round_robin": nine["adbs"] / nine["round-robin"],
        "figure_9_adbs_times_round_robin_on_shares": nine["adbs"] / nine["round-robin on shares"],
    }
    result.targets = {**TARGETS, **figure7.TARGETS}
    target = docs / "mux-paper.md"
    others = f"{figure7.page(seven)}\n{small.page(nine, ten, eight)}"
    target.write_text(page.written(rows, result, others), encoding="utf-8")
    print(target)
    return report.finish(result, args)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__, (*LONG_RUN, "figure_7_*"))
    parser.add_argument("--docs", type=Path, help="folder of mux-paper.md (default: docs)")
    parser.add_argument("--results", type=Path, help="rows (default: bench/results/mux.jsonl)")
    parser.add_argument("--reuse", action="store_true", help="simulate only what --results lacks")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    return parser


def read(file: Path) -> dict[Cell, Row]:
    """Rows of an earlier time; a last line that was cut off is left out."""
    *lines, _ = file.read_bytes().split(b"\n")
    rows = [msgspec.json.decode(line, type=Row) for line in lines]
    return {one.cell: one for one in rows}


def simulate(
    cells: Sequence[Cell], known: Mapping[Cell, Row], workers: int | None, file: Path
) -> list[Row]:
    """All runs, in their order; those known are taken as they are. Rows go to `file`."""
    wanted = [one for one in cells if one not in known]
    rows = dict(known)
    with (
        file.open("wb") as written,
        report.progress() as progress,
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
    ):
        bar = progress.add_task("simulated", total=len(wanted))

        def keep(row: Row) -> None:
            rows[row.cell] = row
            written.write(msgspec.json.encode(row) + b"\n")
            written.flush()

        for row in known.values():
            keep(row)
        for row in pool.map(figure5.run, wanted):
            keep(row)
            progress.advance(bar)
    return [rows[one] for one in cells]


if __name__ == "__main__":
    sys.exit(main())
