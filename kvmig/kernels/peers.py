"""Which GPUs the first one has no access to, over NVLink or PCIe: `python -m` with how many.

A process of its own asks: one in which the driver was begun can't be forked any more, and an
engine's workers are.
"""

from __future__ import annotations

import json
import subprocess
import sys

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.kernels.driver import CudaDriver

TIMEOUT_S = 60.0


def unreached(gpus: int) -> list[int]:
    """The GPUs among the first `gpus` whose memory the first one doesn't reach.

    Raises KernelUnavailable.
    """
    command = [sys.executable, "-m", __name__, str(gpus)]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        raise KernelUnavailable(f"GPUs can't be asked for each other: {why[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(f"GPUs say nothing of each other in {TIMEOUT_S:g} s") from error
    found: list[int] = json.loads(asked.stdout)
    return found


def main() -> None:
    """The process that asks."""
    try:
        first = CudaDriver(0)
        missed = [gpu for gpu in range(1, int(sys.argv[1])) if not first.reaches(gpu)]
    except KvmigError as error:
        sys.exit(str(error))
    print(json.dumps(missed))


if __name__ == "__main__":
    main()
