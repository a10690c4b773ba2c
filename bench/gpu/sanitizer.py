"""The quick correctness checks under compute-sanitizer: accesses outside, and races in shared
memory. Its programs run many times slower, so each tool has a time of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from bench.gpu.device import note_gpu, options_of
from bench.report import begin, finish, say

TOOLS = ("memcheck", "racecheck")
TIMEOUT_S = 30.0


def found() -> str | None:
    """The program: on the path, or in CUDA's folder."""
    folders = os.environ.get("PATH", ""), "/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def errors(printed: str) -> int | None:
    """Of the program's summary; None if it has none."""
    number = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", printed)
    return int(number.group(1)) if number else None


def check(command: list[str], timeout_s: float = TIMEOUT_S) -> tuple[int | None, str]:
    """Errors (None: unknown) and the end of what was printed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    printed = done.stdout + done.stderr
    return errors(printed), "\n".join(printed.splitlines()[-10:])


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    result = begin("gpu sanitizer", {"tools": list(TOOLS)})
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
    for name in TOOLS:
        count, tail = check([tool, "--tool", name, "--target-processes", "all", *program])
        result.samples.append({"tool": name, "errors": count, "tail": tail})
        if count is not None:
            result.summary[f"{name}_errors"] = float(count)
        failed |= count != 0
    result.targets = {f"{name}_errors": {"max": 0} for name in TOOLS}
    return finish(result, options) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
