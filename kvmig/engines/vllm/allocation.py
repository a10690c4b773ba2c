"""vLLM's KV cache in memory of ours: a mapping without pages, as large as the cache may become.

vLLM takes its cache by one `torch.zeros`, which writes all of it. While an engine is made, that one
call gets a mapping of the system's, which is all zeros too, and has a page only once it is written.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.worker import utils

from kvmig.ground.errors import StartupError

_NORESERVE = 0x4000
"""MAP_NORESERVE, which Python's mmap has from 3.13 on."""


@contextmanager
def without_pages() -> Iterator[None]:
    """An engine that is made meanwhile, in this process, on a CPU, has its KV cache there.

    Raises StartupError if vLLM takes it otherwise than expected.
    """
    stand_in = _Torch()
    with patch.object(utils, "torch", stand_in):
        yield
    if stand_in.taken != 1:
        raise StartupError(
            f"vLLM takes its KV cache by {stand_in.taken} allocations of whole bytes, not by one:"
            " it can't be shared with other engines"
        )


class _Torch:
    """The module torch, but for one call."""

    def __init__(self) -> None:
        self.taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **how: Any) -> torch.Tensor:
        """`allocate_kv_cache` asks for bytes."""
        if how.get("dtype") is not torch.int8 or torch.device(how["device"]).type != "cpu":
            return torch.zeros(*size, **how)
        self.taken += 1
        (nbytes,) = size
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.int8)
