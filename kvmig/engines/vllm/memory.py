"""The engine's KV cache as regions, and copies of its blocks on a thread of their own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from kvmig.core.errors import KvmigError, NotParked, UnsupportedLayout
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines import device_copies
from kvmig.engines.block_copies import BlockCopies, BlockPlan, CopyBackend, CopyPlan, HostCopies
from kvmig.engines.vllm import worker
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.subblocks import (
    RankCache,
    SubBlocks,
    UnitMap,
    strips_of,
    units_of,
    whole_blocks,
)
from kvmig.engines.vllm.tables import RequestTables, layer_names
from kvmig.kernels import ipc
from kvmig.kernels.copy import address_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.ipc import SharedAllocation

START_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 30.0


class BlockMemory:
    """One engine's KV cache where requests move: its layout, its blocks, and copies of these.

    `layout` is of what is exchanged, and so are all ids. Buffers may be the host's, and on a GPU
    that GPU's, too. Where vLLM's cache lies in a way that can't be moved, `unmovable` has the
    reason: then there is no region, and copies raise RuntimeError.
    """

    def __init__(self, core: StepCore, unit_tokens: int = 0) -> None:
        """unit_tokens: exchange units of this many tokens with engines of other shapes, see
        `units`; 0: the engine's blocks as they are, with engines that are like it.

        Raises ConfigError or KernelUnavailable.
        """
        scheduler, self._core = core.scheduler, core
        self.num_blocks = scheduler.kv_cache_config.num_blocks
        self._cache: SharedCache | None = None
        self._gpu: device_copies.DeviceCopies | None = None
        self._stepping_on: int | None = None
        """The GPU of a worker that is this process."""
        self.unmovable = ""
        units = units_of(scheduler.block_size, unit_tokens)
        try:
            self.tables = RequestTables(scheduler, units)
            if self.tables.unmovable:
                raise UnsupportedLayout(self.tables.unmovable)
            self.layout, copies = self._describe(unit_tokens)
        except UnsupportedLayout as error:
            self._close_cache()
            self.unmovable, copies = str(error), NoCopies()
            self.tables = RequestTables(scheduler, SubBlocks(scheduler.block_size))
            self.layout = KVLayout((), self.num_blocks, self.tables.block_tokens)
        except KvmigError:
            self._close_cache()
            raise
        self.copies = BlockCopies(self.layout, copies)

    def _describe(self, unit_tokens: int) -> tuple[KVLayout, CopyBackend]:
        config, kv_cache = self._core.vllm_config, self._core.scheduler.kv_cache_config
        self._cache = SharedCache(config, self._core.model_executor, layer_names(kv_cache))
        ranks, tables, plan = self._cache.ranks, self.tables, None
        if unit_tokens:
            heads = _heads(config)
            plan = UnitMap(ranks, heads, self.num_blocks, tables.units, _order(config))
            model = _unit_model(config, ranks[0], heads)
            blocks = self.num_blocks * tables.units.per_block
            layout = KVLayout(plan.wire_regions, blocks, unit_tokens, model)
        else:
            model = _block_model(config, kv_cache, ranks[0])
            regions, tokens = whole_blocks(ranks), tables.block_tokens
            layout = KVLayout(regions, self.num_blocks, tokens, model, tables.count)
        if config.device_config.device_type == "cpu":
            return layout, HostCopies(plan or BlockPlan(layout))
        copies = self._on_gpu(config, plan or BlockPlan(layout), self._cache.gpu)
        copies.width.engine_idle = lambda: not self._core.has_work()
        return replace(layout, gpu=copies.gpu), copies

    def _on_gpu(
        self, config: VllmConfig, plan: CopyPlan, gpu: int | None
    ) -> device_copies.DeviceCopies:
        """Copies on the GPU of this process's worker, or on `gpu`, which opened all workers'.

        Other processes leave no events of their steps, nor need to: the last all-reduce of a step
        comes after all workers' writes, and the tokens that this process gets after that.
        """
        if gpu is None:
            gpu = self._stepping_on = torch.cuda.current_device()
        overlap = config.max_concurrent_batches > 1
        self._gpu = device_copies.load(plan, gpu, steps_overlap=overlap)
        return self._gpu

    @property
    def regions(self) -> tuple[BlockRegion, ...]:
        """Regions of vLLM's own blocks. Raises UnsupportedLayout where they aren't known."""
        if self._cache is None or self.unmovable:
            raise UnsupportedLayout(self.unmovable)
        return whole_blocks(self._cache.ranks)

    @property
    def on_gpu(self) -> bool:
        """Whether copies wait for a GPU."""
        return self._gpu is not None

    def after_step(self) -> None:
        """Record a step; on the engine's thread, after each."""
        if self._gpu is not None and self._stepping_on is not None:
            self._gpu.after_step(torch.cuda.current_stream(self._stepping_on).cuda_stream)

    def settle(self) -> None:
        """Wait for the copies of now, so that none is at memory that goes. Raises TimeoutError."""
        self.copies.submit(list).result(SETTLE_TIMEOUT_S)

    def give_back(self) -> None:
        """Let the system have the cache's memory until it is written again: it is all 0 by then.

        On a CPU only. Nothing may be in it. Raises NotParked where it can't.
        """
        if self._cache is None or self.unmovable:
            raise NotParked(f"where its KV cache lies is not known: {self.unmovable}")
        for cache in self._cache.ranks:
            give_back(cache.address, cache.nbytes, shared=self._cache.shared)

    def close(self) -> None:
        """Wait for the running copy and end the copy thread."""
        self.copies.close()
        try:
            if self._gpu is not None:
                self._gpu.close()
        finally:
            self._close_cache()

    def _close_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()


class NoCopies:
    """`CopyBackend` of a cache that can't be moved: with `Engine.unmovable` none is asked for."""

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        raise RuntimeError("this engine's blocks can't be moved")

    scatter = gather


class SharedCache:
    """The KV caches of an engine's workers as this process sees them.

    `ranks`: each worker's, at addresses that hold here until `close`. A worker that is this process
    has nothing to do. Workers that are processes of their own let this one see their caches, so
    that all copies are made here:

    - on a CPU each one's is moved, before the first step, into memory of this process's own without
      a name (memfd): nothing is left by a process that dies;
    - on GPUs, where CUDA graphs hold its address, it is opened where it is, by the first worker's
      GPU (`gpu`), which has access to the others'.
    """

    gpu: int | None = None
    shared = False
    """Whether it lies in files that several processes have mapped."""

    def __init__(self, config: VllmConfig, executor: Executor, layer_names: Sequence[str]) -> None:
        """Raises UnsupportedLayout, KernelUnavailable, or what vLLM raises when a worker can't."""
        self._held = contextlib.ExitStack()
        names, processes = list(layer_names), len(getattr(executor, "workers", ()))
        if not processes:
            self.ranks = _call(executor, worker.describe_cache, names)
        elif config.device_config.device_type == "cpu":
            self.ranks = self._share(executor, names, processes)
            self.shared = True
        else:
            self.ranks = self._open(executor, names)

    def close(self) -> None:
        """Unmap; no copy may be running."""
        self._held.close()

    def _share(self, executor: Executor, names: list[str], workers: int) -> list[RankCache]:
        with contextlib.ExitStack() as opened:
            files = []
            for rank in range(workers):
                files.append(os.memfd_create(f"kvmig-kv-{rank}", os.MFD_CLOEXEC))
                opened.callback(os.close, files[-1])
            paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
            there: list[RankCache] = _call(executor, worker.share_cache, names, paths)
            mapped = [mmap.mmap(file, one.nbytes) for file, one in zip(files, there, strict=True)]
        for memory in mapped:
            self._held.callback(memory.close)
        return [
            cache.mapped_at(address_of(memoryview(memory)))
            for cache, memory in zip(there, mapped, strict=True)
        ]

    def _open(self, executor: Executor, names: list[str]) -> list[RankCache]:
        there: list[tuple[RankCache, SharedAllocation]] = _call(
            executor, worker.export_cache, names
        )
        self.gpu = there[0][1].gpu
        driver, ranks = CudaDriver(self.gpu), []
        with contextlib.ExitStack() as opened:
            for cache, exported in there:
                address = ipc.open_allocation(driver, exported)
                opened.callback(ipc.close_allocation, driver, exported, address)
                ranks.append(cache.mapped_at(address))
            self._held = opened.pop_all()
        return ranks


_MADV_DONTNEED, _MADV_REMOVE = 4, 9


def give_back(address: int, nbytes: int, *, shared: bool) -> None:
    """The pages that lie in this memory of the process. Raises NotParked."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    libc = ctypes.CDLL(None, use_errno=True)
    advice = _MADV_REMOVE if shared else _MADV_DONTNEED
    if length > 0 and libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice):
        why = os.strerror(ctypes.get_errno())
        raise NotParked(f"the memory of its KV cache can't be given back: {why}")


def _call(executor: Executor, function: object, *args: object) -> list[Any]:
    """What each worker returns. Raises the first KvmigError that one raises."""
    told: list[Any] = executor.collective_rpc(
        worker.attempt, timeout=START_TIMEOUT_S, args=(function, *args)
    )
    for one in told:
        if isinstance(one, KvmigError):
            raise one
    return told


def _heads(config: VllmConfig) -> int:
    """KV heads of the whole model; MLA's latent counts as one."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _order(config: VllmConfig) -> str:
    return str(config.cache_config.kv_cache_layout)


def _block_model(config: VllmConfig, kv_cache: KVCacheConfig, rank: RankCache) -> str:
    """A digest of what must agree for whole blocks to be exchanged."""
    return _digest(
        _order(config),
        *(
            f"{group.layer_names} {_words(group.kv_cache_spec)}"
            for group in kv_cache.kv_cache_groups
        ),
        *sorted({f"{layer.dtype} {layer.shape[1:]} {layer.attention}" for layer in rank.layers}),
        *_model_words(config),
        str(config.parallel_config.tensor_parallel_size),
    )


def _unit_model(config: VllmConfig, rank: RankCache, heads: int) -> str:
    """A digest of what must agree for units to be exchanged."""
    layer = rank.layers[0]
    return _digest("units", layer.dtype, str(strips_of(layer)), str(heads), *_model_words(config))


def _words(spec: KVCacheSpec) -> str:
    """The kind of cache and what isn't usual about it: another vLLM may know of more fields."""
    unusual = {
        one.name: getattr(spec, one.name)
        for one in fields(spec)
        if one.compare and getattr(spec, one.name) != one.default
    }
    return f"{type(spec).__name__} {unusual}"


def _model_words(config: VllmConfig) -> tuple[str, str]:
    model = config.model_config
    hf_config = json.loads(model.hf_config.to_json_string())
    hf_config.pop("transformers_version", None)  # of the library that has read it
    return str(model.dtype), json.dumps(hf_config, sort_keys=True)


def _digest(*words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()
