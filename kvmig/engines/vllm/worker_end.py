"""How a worker process ends; runs in the workers."""

from __future__ import annotations

import atexit
import os
from typing import Any


def end_at_once(worker: Any) -> None:
    """Once vLLM has shut this worker down, end the process without the interpreter's own end.

    That only tears down torch and Triton, which takes seconds. What it would have removed from
    shared memory is removed by `StepCore.shutdown`.
    """
    atexit.register(os._exit, 0)
