"""How long a program waits for `import kvmig`, and for the names that it gets from there.

Each sample is a new Python whose bytecode is compiled already; the first of each is thrown away.
What Python itself takes to start is not counted. Starts no engine.
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from bench import report

STATEMENTS = {
    "kvmig": "import kvmig",
    "migrator": "import kvmig; kvmig.Migrator",
    "engine_port": "import kvmig.engines.base",
    "data_plane": "import kvmig.kernels.copy",
}
TARGETS: dict[str, report.Target] = {"kvmig_s": {"max": 0.3}}
TIMED = "import time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def sample(statement: str) -> float:
    """Seconds that a statement takes in a new Python."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(done.stdout)


def main(argv: list[str] | None = None) -> int:
    options = report.parser(__doc__).parse_args(argv)
    repeats = 5 if options.quick else 20
    result = report.begin("imports", {"repeats": repeats, "statements": STATEMENTS})
    for name, statement in STATEMENTS.items():
        times = [sample(statement) for _ in range(repeats + 1)][1:]
        result.samples += [{"name": name, "s": time} for time in times]
        result.summary[f"{name}_s"] = median(times)
    result.targets = TARGETS
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
