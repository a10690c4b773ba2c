"""What `test_cuda_wheels` has forked: it writes down what it was forked with, then ends."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def main(_: Sequence[str]) -> int:
    """Print it. torch is there: nothing is imported here."""
    torch = sys.modules["torch"]
    found = {
        "cuda": torch.version.cuda,
        "initialized": torch.cuda.is_initialized(),
        "modules": [name for name in sys.modules if name.startswith("vllm.")],
        "threads": [one.name for one in threading.enumerate()],
        "files": [str(one.readlink()) for one in DESCRIPTORS.iterdir() if one.is_symlink()],
        "blas": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    print(json.dumps(found), flush=True)
    return 0
