"""`--worker-cls=bench.chaos.worker.ChaosWorker`: vLLM's, in a process in which things go wrong.

Alone in its file: it takes vLLM, which whoever only gives the orders has no use for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from bench.chaos.hooks import FOLDER, install
from bench.paced import PacedWorker


class ChaosWorker(PacedWorker):
    """A paced worker, with the hooks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if folder := os.environ.get(FOLDER):
            install(Path(folder))
