"""The quick correctness checks under compute-sanitizer: accesses outside, and races in shared
memory. Its programs run many times slower, so each run has a time of its own.

racecheck doesn't see the order that mbarriers and the TMA's bulk copies keep, because they are
PTX, and reports every stage of the ring of kvmig_copy_tma_kernel. So it runs twice: over the
library as it is, where what it reports of that kernel alone is counted apart (`suppressed`), and
over one in which the same ring has cuda::barrier and plain accesses (csrc/ptx_racecheck.cuh).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.device import note_gpu, options_of
from bench.report import begin, finish, say
from kvmig.core.errors import KvmigError
from kvmig.kernels import build

TIMEOUT_S = 30.0
LINES = 80
"""Most lines of accesses that are kept."""
UNSEEN = "kvmig_copy_tma_kernel"
"""The kernel whose order racecheck doesn't see."""
_RACE = re.compile(r"Race reported between .* access at (\w+)\+.*\n=+\s+and .* access at (\w+)\+")


@dataclass(frozen=True, slots=True)
class SanitizerRun:
    """One run. plain: over the library whose ring racecheck understands."""

    name: str
    tool: str
    plain: bool = False


RUNS = (
    SanitizerRun("memcheck", "memcheck"),
    SanitizerRun("racecheck", "racecheck"),
    SanitizerRun("racecheck-plain", "racecheck", plain=True),
)


def plain_library() -> build.BuildRecipe:
    """The CUDA library with the functions of ptx_racecheck.cuh."""
    product = build.cuda()
    more = ("-DKVMIG_RACECHECK", "-lineinfo")
    parts = ("libkvmig_cuda_racecheck", product.sources, product.headers)
    return build.BuildRecipe(*parts, lambda: [*product.compiler(), *more], product.link)


def found() -> str | None:
    """The program: on the path, or in CUDA's folder."""
    folders = os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def errors(printed: str) -> int | None:
    """Of the program's summary; None if it has none."""
    number = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    return int(number.group(1)) if number else None


def suppressed(printed: str) -> int:
    """Races that are reported within UNSEEN alone."""
    return sum(one == other == UNSEEN for one, other in _RACE.findall(printed))


def check(
    command: list[str], timeout_s: float = TIMEOUT_S, library: Path | None = None
) -> tuple[int | None, str]:
    """Errors (None: unknown) and what was printed. library: to load in place of the product's."""
    more = {} if library is None else {"KVMIG_CUDA_LIBRARY": str(library)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | more,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    printed = done.stdout + done.stderr
    return errors(printed), printed


def sample_of(run: SanitizerRun, command: list[str]) -> dict[str, Any]:
    """One run's errors without those that are suppressed, and what tells of them."""
    try:
        library = build.cached_library(plain_library()) if run.plain else None
    except KvmigError as error:
        return {"tool": run.name, "errors": None, "suppressed": 0, "tail": str(error)}
    count, printed = check(command, library=library)
    apart = suppressed(printed) if run.name == "racecheck" else 0
    told = [line for line in printed.splitlines() if " access at " in line]
    tail = printed.splitlines()[-10:]
    left = None if count is None else max(0, count - apart)
    return {
        "tool": run.name, "errors": left, "suppressed": apart,
        "tail": "\n".join([*told[:LINES], *tail]),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    result = begin("gpu sanitizer", {"runs": [run.name for run in RUNS]})
    note_gpu(result)
    tool = found()
    if tool is None:
        say("compute-sanitizer is not installed")
        result.samples.append({"reason": "compute-sanitizer is not installed"})
        return finish(result, options)
    # The CUDA library's kernels only: compiling others takes minutes under the sanitizer.
    inner = ["--device", options.device, "--quick", "--only", "cuda"]
    program = [sys.executable, "-m", "bench.gpu.correctness", *inner]
    failed = False
    for run in RUNS:
        command = [tool, "--tool", run.tool, "--target-processes", "all", *program]
        sample = sample_of(run, command)
        result.samples.append(sample)
        if sample["errors"] is not None:
            result.summary[f"{run.name}_errors"] = float(sample["errors"])
            result.summary[f"{run.name}_suppressed"] = float(sample["suppressed"])
        failed |= sample["errors"] != 0
    result.targets = {f"{run.name}_errors": {"max": 0} for run in RUNS}
    return finish(result, options) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
