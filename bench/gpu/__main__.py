"""Runs the parts one after the other, each in a process of its own that may take only so long.

`--set a` to h runs some of them, at most nine minutes, for machines that are lent for so long.
A part that fails is noted, and the next goes on; so is one that is skipped because something
isn't installed. Exit status: 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.gpu.device import SKIPPED, note_gpu
from bench.report import Result, begin, dumps, say, table

TAIL_LINES = 15
FILE = "gpu.json"


@dataclass(frozen=True, slots=True)
class Part:
    """`python -m bench.gpu.NAME`, and the longest it may take.

    module: or another one's program, in an environment with `variables`.
    """

    name: str
    seconds: float
    module: str = ""
    variables: tuple[tuple[str, str], ...] = ()


PARTS = (
    Part("correctness", 60),
    Part("migration", 125),
    Part("downtime", 50),
    Part("gather", 90),
    Part("interference", 50),
    Part("links", 35),
    Part("ceilings", 60),
    Part("transports", 60),
    Part("sanitizer", 95),
    Part("units", 30),
    Part("serving", 270),
    Part("kill", 150),
    Part("plain", 270),
    Part("fleet", 270),
    Part("serving-v1", 270, "serving", (("VLLM_USE_V2_MODEL_RUNNER", "0"),)),
    Part("serving-invariant", 270, "serving", (("VLLM_BATCH_INVARIANT", "1"),)),
    Part("sharing", 270),
    Part("sharing-mps", 270, "sharing", (("KVMIG_BENCH_MPS", "1"),)),
    Part("pause", 270),
    Part("pause-mps", 270, "pause", (("KVMIG_BENCH_MPS", "1"),)),
    Part("pause-v1", 270, "pause", (("VLLM_USE_V2_MODEL_RUNNER", "0"),)),
    Part("costs", 480),
)
"""In order of worth, should the GPU be gone before the end; 655 s at most, and those of whole
servers where vLLM is installed."""
SETS = {
    "a": ("correctness", "serving", "kill", "transports"),
    "b": ("serving-invariant", "serving-v1"),
    "c": ("gather", "links", "interference", "downtime", "units", "ceilings", "sanitizer",
          "migration"),
    "d": ("sharing", "sharing-mps"),
    "e": ("plain", "fleet"),
    "f": ("costs",),
    "g": ("pause", "pause-mps"),
    "h": ("pause-v1",),
}  # fmt: skip
"""Parts that fit into SET_S together, the most worth first."""
SET_S = 540.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part went; the end of what it printed if it failed."""

    name: str
    status: str
    seconds: float
    tail: str = ""


def command(part: Part, out: Path, arguments: list[str]) -> list[str]:
    """Of its process."""
    file = out / f"gpu_{part.name}.json"
    module = f"bench.gpu.{part.module or part.name}"
    return [sys.executable, "-m", module, "--out", str(file), *arguments]


def run(part: Part, out: Path, arguments: list[str]) -> Outcome:
    """One part; when its time is over, all of its processes are killed."""
    start = time.monotonic()
    process = subprocess.Popen(
        command(part, out, arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, **dict(part.variables)},
    )
    try:
        printed, _ = process.communicate(timeout=part.seconds)
        status = {0: "passed", SKIPPED: "skipped"}.get(
            process.returncode, f"failed ({process.returncode})"
        )
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        status = f"killed after {part.seconds:g} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    print(printed, flush=True)
    tail = "" if status == "passed" else "\n".join(printed.splitlines()[-TAIL_LINES:])
    return Outcome(part.name, status, time.monotonic() - start, tail)


def record(result: Result, outcomes: list[Outcome], out: Path) -> None:
    """Written anew after each part, so that an end from outside loses no part."""
    result.summary = {
        "parts_passed": float(sum(outcome.status == "passed" for outcome in outcomes)),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
    }
    result.samples = [
        {"part": one.name, "status": one.status, "seconds": round(one.seconds, 1), "tail": one.tail}
        for one in outcomes
    ]
    (out / FILE).write_text(dumps(result))


def main(arguments: list[str] | None = None, parts: tuple[Part, ...] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--set",
        choices=SETS,
        help="a: correctness; b: variants; c: speed; d: units; e: servers; f: costs; g: the pause,"
        " without MPS and with it; h: the pause on model runner V1",
    )
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts], metavar="PART")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    passed_on = ["--device", options.device, *(["--quick"] if options.quick else [])]
    names = options.only or (SETS[options.set] if options.set else [part.name for part in parts])
    chosen = [part for part in parts if part.name in names]

    result = begin("gpu", {"parts": [part.name for part in chosen], "device": options.device})
    note_gpu(result)
    result.targets = {"parts_passed": {"min": len(chosen)}}
    outcomes: list[Outcome] = []
    for part in chosen:
        say(f"== {part.name} (at most {part.seconds:g} s)")
        outcomes.append(run(part, options.out, passed_on))
        record(result, outcomes, options.out)
    rows = [(one.name, one.status, f"{one.seconds:.0f}") for one in outcomes]
    Console().print(table("gpu", ("part", "", "seconds"), rows))
    return 0 if all(one.status in ("passed", "skipped") for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
