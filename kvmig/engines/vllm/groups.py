"""vLLM's process groups where there is one process: one thread for all of them.

vLLM makes a dozen groups of gloo's at its start, and torch gives each a network device of its own,
whose thread looks a hundred times a second for what may have come. To groups of one member nothing
ever comes, but together they would take more than 1 % of a core of an engine that does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, distributed_c10d


@contextmanager
def one_device() -> Iterator[None]:
    """Groups of gloo's that are made meanwhile in this process share one network device."""
    device = ProcessGroupGloo.create_default_device()

    class OneDeviceGroup(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            gloo: Any = ProcessGroupGloo  # whose stubs name its options otherwise
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            super().__init__(store, rank, size, options)

    with patch.object(distributed_c10d, "ProcessGroupGloo", OneDeviceGroup):
        yield
