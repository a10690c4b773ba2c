"""The KV caches of an engine's workers as this process sees them.

With one worker, which is this process, there is nothing to do. With several (on a CPU, see
`config.refuse_workers`) each one's cache is moved, before the first step, into memory of
this process's own without a name (memfd), so that all copies are made here and nothing can
be left behind by a process that dies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence

from vllm.config import VllmConfig
from vllm.v1.executor import Executor

from kvmig.engines.vllm import worker_cache
from kvmig.engines.vllm.cache_shape import RankCache
from kvmig.kernels.copy import address_of

START_TIMEOUT_S = 120.0


class SharedCache:
    """`ranks`: each worker's cache, at addresses that hold here until `close`."""

    def __init__(self, config: VllmConfig, executor: Executor, layer_names: Sequence[str]) -> None:
        """Raises UnsupportedLayout, or what vLLM raises when a worker can't."""
        self._mapped: list[mmap.mmap] = []
        names = list(layer_names)
        if config.parallel_config.world_size == 1:
            self.ranks = _call(executor, worker_cache.describe_cache, names)
            return
        self.ranks = self._share(executor, names, config.parallel_config.world_size)

    def close(self) -> None:
        """Unmap; no copy may be running."""
        while self._mapped:
            self._mapped.pop().close()

    def _share(self, executor: Executor, names: list[str], workers: int) -> list[RankCache]:
        with contextlib.ExitStack() as opened:
            files = []
            for rank in range(workers):
                files.append(os.memfd_create(f"kvmig-kv-{rank}", os.MFD_CLOEXEC))
                opened.callback(os.close, files[-1])
            paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
            there = _call(executor, worker_cache.share_cache, names, paths)
            for file, cache in zip(files, there, strict=True):
                self._mapped.append(mmap.mmap(file, cache.nbytes))
        return [
            cache.mapped_at(address_of(memoryview(memory)))
            for cache, memory in zip(there, self._mapped, strict=True)
        ]


def _call(executor: Executor, function: object, *args: object) -> list[RankCache]:
    ranks: list[RankCache] = executor.collective_rpc(function, timeout=START_TIMEOUT_S, args=args)
    return ranks
