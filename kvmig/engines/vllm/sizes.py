"""What vLLM will take for a model, by vLLM itself: its own layers are made without any memory, and
give the sizes of their weights and of what they keep of a request. Nothing is loaded.

Only for a process that makes no engine afterwards: it gets a process group of one.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.engines.identity import tensors_of
from kvmig.engines.vllm.compat import cache_groups, pool_block


def sizes_of(config: VllmConfig) -> ModelSizes:
    """Make the model without memory, and measure it. Raises what vLLM raises."""
    workers = config.parallel_config.tensor_parallel_size
    model = config.model_config
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        try:
            parallel_state.initialize_model_parallel(1, 1)
            # Layers ask how many share them, and nothing else, while they are made.
            parallel_state.get_tp_group().world_size = workers
            with set_default_torch_dtype(model.dtype), torch.device("meta"):
                made = initialize_model(config)
            groups, block = groups_of(config)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        kinds = tuple(by_kind(groups, block, config))
    tensors = {id(one): one for one in (*made.parameters(), *made.buffers())}
    return ModelSizes(
        weights=sum(one.numel() * one.element_size() for one in tensors.values()),
        files=sum(one.size for one in tensors_of(Path(model.model))),
        tokens=model.max_model_len,
        workers=workers,
        layers=kinds,
        shortest=len(groups) * block,
        reserved=block,
    )


def groups_of(config: VllmConfig) -> tuple[Sequence[KVCacheGroupSpec], int]:
    """The groups that vLLM's own start makes of the layers, in its order, and the bytes of a block,
    which all groups share: the widest one's."""
    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    specs = get_kv_cache_spec(config)
    backends = get_current_attn_backends(config)
    layouts = [one.name for one in get_supported_kv_cache_layouts(backends)]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = cache_groups(config, specs)
    return groups, pool_block(config, groups) if groups else 0


def by_kind(
    groups: Iterable[KVCacheGroupSpec], block: int, config: VllmConfig
) -> Iterator[LayerSizes]:
    """What layers of each kind keep of one request, by vLLM's own arithmetic. A group takes whole
    blocks of the size that all groups share, so what a narrow group leaves empty counts, too.

    block: bytes of a block.
    """
    tokens = config.model_config.max_model_len
    layers: Counter[str] = Counter()
    each: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for group in groups:
        specs = specs_of(group)
        layers.update(type(one).__name__ for one in specs)
        pages: Counter[str] = Counter()
        for one in specs:
            pages[type(one).__name__] += one.page_size_bytes
        ((widest, _),) = pages.most_common(1)
        pages[widest] += block - pages.total()
        blocks = max(blocks_of(one, config) for one in specs)
        # A state's block is as long as a request, however many tokens that has.
        states = {type(one).__name__ for one in specs if isinstance(one, MambaSpec)}
        for kind, size in pages.items():
            token = 0 if kind in states else size // group.kv_cache_spec.block_size
            most[kind] += size * blocks
            each[kind] += token if size * blocks >= tokens * token else 0
    for kind in sorted(layers):
        yield LayerSizes(kind=kind, layers=layers[kind], token=each[kind], request=most[kind])


def specs_of(group: KVCacheGroupSpec) -> Sequence[KVCacheSpec]:
    """What each layer of a group keeps."""
    spec = group.kv_cache_spec
    mixed = getattr(spec, "kv_cache_specs", None)
    return [spec] * len(group.layer_names) if mixed is None else list(mixed.values())


def blocks_of(spec: KVCacheSpec, config: VllmConfig) -> int:
    """Blocks at most that one request of the model's whole length takes in a layer's group."""
    return -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes)
