"""What vLLM will take for a model, by vLLM itself: its own layers are made without any memory, and
give the sizes of their weights and of what they keep of a request. Nothing is loaded.

Only for a process that makes no engine afterwards: it gets a process group of one.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from kvmig.core.model_sizes import LayerSizes, ModelSizes
from kvmig.engines.identity import tensors_of


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
            layers = get_layers_from_vllm_config(config, AttentionLayerBase)
            specs = [layer.get_kv_cache_spec(config) for layer in layers.values()]
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        keeping = [spec for spec in specs if spec is not None]
        kinds = by_kind(keeping, config)
    tensors = {id(one): one for one in (*made.parameters(), *made.buffers())}
    return ModelSizes(
        weights=sum(one.numel() * one.element_size() for one in tensors.values()),
        files=sum(one.size for one in tensors_of(Path(model.model))),
        tokens=model.max_model_len,
        workers=workers,
        layers=tuple(kinds),
        shortest=sum(one.page_size_bytes for one in keeping),
    )


def by_kind(specs: Iterable[KVCacheSpec], config: VllmConfig) -> Iterable[LayerSizes]:
    """What layers of each kind keep of one request, by vLLM's own arithmetic."""
    kinds: dict[str, list[KVCacheSpec]] = defaultdict(list)
    for spec in specs:
        kinds[type(spec).__name__].append(spec)
    for kind, alike in sorted(kinds.items()):
        tokens = config.model_config.max_model_len
        most = [one.max_memory_usage_bytes(config) for one in alike]
        each = [
            # A state's page is as long as a request, however many tokens that has.
            0 if isinstance(one, MambaSpec) else one.page_size_bytes // one.block_size
            for one in alike
        ]
        grows = [one for one, size in zip(each, most, strict=True) if size >= tokens * one]
        yield LayerSizes(kind=kind, layers=len(alike), token=sum(grows), request=sum(most))
