"""The engine's KV cache as regions, and copies of its blocks on a thread of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvmig.engines import device_copies
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.copies import Copies, WholeBlocks
from kvmig.engines.vllm.cache_shape import RankCache, whole_blocks
from kvmig.engines.vllm.shared_cache import SharedCache
from kvmig.engines.vllm.strips import strips_of
from kvmig.engines.vllm.tables import Tables, layer_names
from kvmig.engines.vllm.unit_copies import InUnits
from kvmig.engines.vllm.units import UnitMap, units_of
from kvmig.ground.errors import KvmigError, UnsupportedLayout
from kvmig.ground.layout import KVLayout
from kvmig.kernels.copy import backend


class BlockMemory:
    """Gathers and scatters blocks of one engine's KV cache, one copy at a time.

    unit_tokens: exchange units of so many tokens with engines of other shapes, see `units`;
    0: the engine's blocks as they are, with engines that are like it. `layout` is of what
    is exchanged, and so are all ids. Buffers may be the host's, and on a GPU that GPU's, too.
    """

    def __init__(self, core: EngineCore, unit_tokens: int = 0) -> None:
        """Raises UnsupportedLayout, ConfigError or KernelUnavailable."""
        scheduler, config = core.scheduler, core.vllm_config
        assert isinstance(scheduler, Scheduler)
        kv_cache = scheduler.kv_cache_config
        self.units = units_of(scheduler.block_size, unit_tokens)
        self.tables = Tables(scheduler, self.units)
        if self.tables.unmovable:
            raise UnsupportedLayout(self.tables.unmovable)
        self.after_step: Callable[[], None] = lambda: None
        """To be called on the engine's thread after each step."""
        self._close_copies: Callable[[], None] = lambda: None
        self._cache = SharedCache(config, core.model_executor, layer_names(kv_cache))
        try:
            self.layout, copies = self._describe(core, unit_tokens)
        except KvmigError:
            self._cache.close()
            raise
        self._copies = BlockCopies(self.layout, copies)

    def _describe(self, core: EngineCore, unit_tokens: int) -> tuple[KVLayout, Copies]:
        config, ranks = core.vllm_config, self._cache.ranks
        num_blocks = core.scheduler.kv_cache_config.num_blocks
        on_gpu = self.on_gpu = config.device_config.device_type != "cpu"
        if not on_gpu:
            backend()  # built now if it must be, not in somebody's first copy
        if unit_tokens:
            heads = _heads(config)
            units = UnitMap(ranks, heads, num_blocks, self.units, _order(config))
            model = _unit_model(config, ranks[0], heads)
            blocks = num_blocks * self.units.per_block
            layout = KVLayout(units.wire_regions, blocks, unit_tokens, model)
            return layout, self._on_gpu(config, units) if on_gpu else InUnits(units)
        tables = self.tables
        model = _block_model(config, core.scheduler.kv_cache_config, ranks[0])
        layout = KVLayout(whole_blocks(ranks), num_blocks, tables.block_tokens, model, tables.count)
        if on_gpu:
            return layout, self._on_gpu(config, device_copies.Blocks(layout))
        return layout, WholeBlocks(layout)

    def _on_gpu(self, config: VllmConfig, plan: device_copies.Plan) -> Copies:
        """On the GPU of the calling thread, which is the worker's here."""
        gpu = torch.cuda.current_device()
        copies = device_copies.load(plan, steps_overlap=config.max_concurrent_batches > 1)
        self.after_step = lambda: copies.after_step(torch.cuda.current_stream(gpu).cuda_stream)
        self._close_copies = copies.close
        return copies

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """Blocks [n] into `out`, fused; returns n checksums. urgent: ahead of other copies."""
        return await self._copies.gather(block_ids, out, urgent)

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        """`data` [n * block_bytes] into blocks [n]; returns n checksums of `data`."""
        return await self._copies.scatter(block_ids, data, urgent)

    def gather_now(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """`gather` on the calling thread; [] and nothing done where that would wait for a GPU,
        or where they don't fit into `out`."""
        size = len(block_ids) * self.layout.block_bytes
        if self.on_gpu or size > out.nbytes:
            return []
        return self._copies.gather_now(block_ids, out[:size])

    def scatter_now(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """`scatter` on the calling thread, where it needn't wait for a GPU."""
        return self._copies.scatter_now(block_ids, data)

    def close(self) -> None:
        """Wait for the running copy and end the copy thread."""
        self._copies.close()
        try:
            self._close_copies()
        finally:
            self._cache.close()


def _heads(config: VllmConfig) -> int:
    """All KV heads of the model; MLA's latent counts as one."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def _order(config: VllmConfig) -> str:
    return str(config.cache_config.kv_cache_layout)


def _block_model(config: VllmConfig, kv_cache: KVCacheConfig, rank: RankCache) -> str:
    """What must agree for whole blocks to be exchanged."""
    return _digest(
        _order(config),
        *(f"{group.layer_names} {group.kv_cache_spec}" for group in kv_cache.kv_cache_groups),
        *sorted({f"{layer.dtype} {layer.shape[1:]} {layer.attention}" for layer in rank.layers}),
        *_model_words(config),
        str(config.parallel_config.tensor_parallel_size),
    )


def _unit_model(config: VllmConfig, rank: RankCache, heads: int) -> str:
    """What must agree for units to be exchanged."""
    layer = rank.layers[0]
    return _digest("units", layer.dtype, str(strips_of(layer)), str(heads), *_model_words(config))


def _model_words(config: VllmConfig) -> tuple[str, str]:
    model = config.model_config
    return str(model.dtype), str(model.hf_config.to_json_string())


def _digest(*words: str) -> str:
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).hexdigest()
